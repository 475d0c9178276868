"""What is wrong, in one sentence with a remedy: `table` holds every fact once, `api` and `pods` recognise them."""
