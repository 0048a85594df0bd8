/* Two slots in flash for all that a training run changes, of which one is always complete: see checkpoint.c. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

/* Loads the newest complete checkpoint. 0 if there is none: the model then has its initial values. */
int checkpoint_load(void);
/* Saves the model to the older slot. 0 if the flash failed: the newer slot is still complete. */
int checkpoint_save(void);

#endif
