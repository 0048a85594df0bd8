/* Two copies in flash of all that a training run changes, of which one is always whole: see checkpoint.c. */
#ifndef CHECKPOINT_H
#define CHECKPOINT_H

/* The newest whole copy, into the model. 0 where there is none: the model then has its first values. */
int checkpoint_load(void);
/* The model as it is now, over the older copy. 0 if the flash failed: the newer copy is still there and whole. */
int checkpoint_save(void);

#endif
