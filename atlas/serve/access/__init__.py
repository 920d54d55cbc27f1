"""Who may ask, and how much: layers around the routes, and what a connection may cost."""
