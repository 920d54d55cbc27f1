"""The API described by itself: endpoints as a table, the OpenAPI document, a page to read."""
