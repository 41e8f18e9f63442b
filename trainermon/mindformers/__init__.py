"""Files and tags of MindFormers' online monitor."""
