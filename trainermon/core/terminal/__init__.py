"""What every command does alike in a terminal."""
