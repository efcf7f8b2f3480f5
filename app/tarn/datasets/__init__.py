"""Dataset registry and configuration documents."""
