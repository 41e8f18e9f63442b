"""A folder that reproduces one recorded call with torch alone: see README.md."""
