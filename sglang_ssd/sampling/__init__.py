"""Pure tensor functions shared by the target's and the draft's side: noise, draws, acceptance."""
