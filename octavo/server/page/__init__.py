"""The routes of the page, which is in ``octavo.page``."""
