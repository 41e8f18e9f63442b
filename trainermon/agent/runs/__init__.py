"""The runs of folders, living and finished, from their files: `trainermon serve`."""
