"""What memory there is, which elements an access means, and carrying it out."""
