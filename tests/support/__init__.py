"""What the tests share: real servers, a strict SSE parser, bounded waiting."""
