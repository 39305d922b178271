mv old new
