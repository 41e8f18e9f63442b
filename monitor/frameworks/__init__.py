"""How each training framework reduces, holds and steps its parameters: one small module per framework."""
