"""Vision towers: images of any size packed into blocks, blocks spread over dp, weights over tp, features gathered."""
