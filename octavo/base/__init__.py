"""What every part may use: errors, typed fields of foreign files, atomic files, options."""
