touch a.txt b.txt
