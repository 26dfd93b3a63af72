"""Operations under way: who waits for them, who carries them out, how they end."""
