"""What of flash_attn.layers the test file imports."""
