"""Jobs, queue items, locks, events, and how work is scheduled and cancelled."""
