"""Text to token ids and back, and chats to text: for library, server and benchmarks. No torch."""
