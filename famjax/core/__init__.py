"""What all other packages share: errors, types, untrusted files, units."""
