"""What every part of octavo may use: errors, typed fields of foreign files, atomic files, options."""
