"""The API of Hugging Face's TGI."""
