sort words -o words
