mkdir made
