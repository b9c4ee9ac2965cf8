"""HTTP/1.1, down to the bytes: connections, access control and limits, bodies, errors, streams."""
