"""What differs between the SGLang releases that this distribution supports; nothing else knows releases."""
