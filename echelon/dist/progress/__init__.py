"""Operations in progress: their waiters, their execution and their ends."""
