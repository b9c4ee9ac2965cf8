"""The page (chat, pictures that compute, documents), served or as a folder that needs no server."""
