"""HTTP API: one thin router per resource (`routes`) and the request pipeline they share (`http`)."""
