printf "%s, %s\n%s\n" "$GREETING" "$NAME" "$FROM_IMAGE" > "$TO"
