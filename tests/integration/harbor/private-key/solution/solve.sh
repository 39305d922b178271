chmod 600 key
