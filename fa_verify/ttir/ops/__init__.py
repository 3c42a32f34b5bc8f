"""What each operation of TTIR does: tables from operation names to rules."""
