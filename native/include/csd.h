/* csd.h -- the one interface between csd_optim's Python and its engine.
 *
 * A *device* is a computational storage device (CSD), real or emulated. It keeps
 * an optimizer's fp32 state and updates it. An *engine* drives several devices as one:
 *
 *     csd_engine_create(devices)           once
 *     csd_engine_extend(parameters)        whenever parameters join
 *     csd_engine_begin(...)                each step: states start to flow in,
 *       csd_engine_push(tile, ...)         gradients go to the devices,
 *       csd_engine_pull(&tile)             updated parameters come back,
 *     csd_engine_finish(...)               the step is whole (or undone)
 *     csd_engine_close()
 *
 * The smallest complete step: one parameter, in one tile of a device in memory, by AdamW (its constants: adamw.h).
 *
 *     #include <stdio.h>
 *     #include "csd.h"
 *
 *     int main(void) {
 *       enum { N = 1000, TILE = 1024 };
 *       static float param[N], grad[N];
 *       for (int i = 0; i < N; i++) grad[i] = 1;
 *
 *       const csd_device device = {.backend = "ram"};
 *       const uint64_t file_offset = 0;
 *       const csd_piece piece = {.param = 0, .tile = 0, .elems = N};
 *       const csd_extent extent = {.tile_elems = TILE, .n_tiles = 1, .sections = 3, .slots = 2, .sum_elems = TILE,
 *                                  .file_offset = &file_offset, .pieces = &piece, .n_pieces = 1};
 *       const csd_param params = {.grad = grad, .param = param, .grad_dtype = CSD_F32, .param_dtype = CSD_F32};
 *       const csd_hyper first = {CSD_ADAMW, {1, 0.9f, 0.1f, 0.999f, 0.001f, 1, 31.6228f, 1e-8f, 1}};
 *       const uint32_t tile = 0;
 *       csd_engine *engine;
 *       float *state[4];
 *       csd_error error;
 *       if (csd_engine_create(&device, 1, &engine, &error) ||
 *           csd_engine_extend(engine, &extent, state, &error) ||
 *           csd_engine_begin(engine, &params, 1, &first, 1, &tile, 1, 0, &error) ||
 *           csd_engine_push(engine, tile, NULL, NULL, NULL, 0, &error) ||
 *           csd_engine_finish(engine, 1, &error) ||
 *           csd_engine_remap(engine, 1, &error)) {
 *         puts(error.text);
 *         return 1;
 *       }
 *       printf("param %.3f, exp_avg %.3f\n", param[0], state[1][0]);  // param -0.100, exp_avg 0.100
 *       for (int s = 0; s < 3; s++) csd_window_release(state[s], TILE);
 *       return csd_engine_close(engine, &error);
 *     }
 *
 * Parameters lie one after another in a *flat space*, cut into *tiles*: the unit of
 * I/O and of update. A tile's state is one to four *sections*, each `elems` fp32 values: with AdamW
 * [master | exp_avg | exp_avg_sq (| max_exp_avg_sq)]; or codes of them (csd_codec). A tile has two *slots* on its device: a step
 * reads one and writes the other, so that the old state is untouched until the step after it.
 *
 * Every function returns 0 or a negative csd_status, and then fills `*error` if it is
 * not NULL. Lengths and offsets are in elements unless the name says bytes. One step
 * at a time per engine; different engines may be used from different threads. */
#ifndef CSD_H
#define CSD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: from here on this file is read by cffi as it stands. */

enum csd_status {
  CSD_OK = 0,
  CSD_EINVAL = -1, /* an argument is wrong; nothing was touched */
  CSD_EIO = -2,    /* the operating system refused; `os_errno` says how */
  CSD_ENOMEM = -3,
  CSD_ESTATE = -4,   /* called out of order */
  CSD_EDAMAGED = -5, /* a tile is not what was written there */
  CSD_ETORN = -6,    /* a step in place was cut short: what it wrote cannot be undone */
  CSD_EDEVICE = -7   /* a card cannot be used, or no longer; `os_errno` says more where it can */
};

typedef struct csd_error {
  int32_t status;
  int32_t os_errno; /* 0 where the operating system had no part in it */
  int32_t device;   /* index of the device, or -1 */
  int32_t tile;     /* index of the damaged tile, or -1 */
  char text[240];   /* what happened, where; NUL-terminated */
} csd_error;

enum csd_dtype { CSD_F32 = 0, CSD_F16 = 1, CSD_BF16 = 2 };

/* The update rules. Each has a header beside this one that says what its constants and sections are; rules.h lists
 * them. The first section of a tile is the fp32 master with all of them. */
enum csd_rule {
  CSD_ADAMW = 0,   /* adamw.h */
  CSD_AMSGRAD = 1, /* the same, divided by the root of exp_avg_sq's running maximum: a fourth section */
  CSD_ADAM = 2,    /* adam.h */
  CSD_ADAM_AMSGRAD = 3,
  CSD_SGD = 4, /* sgd.h */
  CSD_SGD_MOMENTUM = 5,
  CSD_SGD_NESTEROV = 6,
  CSD_ADAGRAD = 7, /* adagrad.h */
  CSD_RMSPROP = 8, /* rmsprop.h */
  CSD_RMSPROP_CENTERED = 9,
  CSD_RMSPROP_MOMENTUM = 10,
  CSD_RMSPROP_BOTH = 11,
  CSD_RMSPROP_UNCENTERED = 12,
  CSD_LION = 13 /* lion.h */
};

/* How a tile keeps its states. */
enum csd_codec {
  CSD_FP32 = 0, /* as they are: a section each */
  /* 8 bits for each of AdamW's, in sections of their own, each from a new page of 4096 bytes on: parameter (16 bits;
   * then correction, 1 byte) or fp32 master; ratio and root, 1 byte, and exponent, 1 byte for 64 elements; of
   * max_exp_avg_sq peak and its exponent. See codec.h */
  CSD_8BIT = 1
};

/* Of a csd_hyper's constants, with every rule: what a gradient is multiplied by (1/loss scale, clipping, -1 to
 * maximize). */
#define CSD_GRAD_SCALE 8

/* One step's constants for one parameter. */
typedef struct csd_hyper {
  uint32_t rule; /* csd_rule */
  float c[9];    /* as the rule has them */
} csd_hyper;

/* ---- Devices ------------------------------------------------------------ */

/* Requests in flight per file system, whatever the number of engines and devices, unless one asks for more. Four of a
 * megabyte already saturate the drives we measured; twice that keeps reads and writes going at the same time. */
#define CSD_IO_DEPTH 8

/* The FPGA of a SmartSSD, through the Xilinx runtime (XRT), which is loaded when the first one is opened. */
typedef struct csd_card csd_card;

/* How fast an emulated device is at most: at the end. */
typedef struct csd_pace csd_pace;

/* Between drive and card: directly where that works, insist on it, or through host memory. */
enum csd_p2p { CSD_P2P_AUTO = 0, CSD_P2P_ON = 1, CSD_P2P_OFF = 2 };

typedef struct csd_device {
  /* "file": tiles in a file; "xrt": in a file on a SmartSSD's drive; "null": nowhere;
   * "ram": in memory, updated in place; or with `buffers`, in the slots of `fd`, a file of memory (memfd_create) */
  const char *backend;
  int32_t fd;           /* file, xrt: open for reading and writing, belongs to the caller, outlives the engine */
  uint32_t buffers;     /* file, xrt: tile buffers, allocated once and fixed; with 1, nothing overlaps */
  uint64_t block_bytes; /* file, xrt: size of one I/O request, a multiple of 4096, up to 1 GiB */
  csd_card *card;       /* xrt: belongs to the caller, outlives the engine */
  uint32_t p2p;         /* xrt: csd_p2p */
  const csd_pace *pace; /* not xrt; read by csd_engine_create. NULL: as fast as it goes */
  uint32_t depth;       /* file, xrt: that many requests in flight on its file system; not fewer than CSD_IO_DEPTH */
  /* file: memory for more buffers. A buffer keeps the tile that was written from it, until it is used for another; a
   * step need not read a tile that a buffer has. -1: it does all the same */
  int64_t cache_bytes;
  /* file: 1 + the NUMA node of its drive, from which its buffers come and on whose CPUs its tiles are updated, where the
   * system allows it; 0: any */
  uint32_t numa;
} csd_device;

typedef struct csd_engine csd_engine;

int csd_engine_create(const csd_device *devices, uint32_t n_devices, csd_engine **out, csd_error *error);

/* Waits for all writes, stops and frees everything but the windows (see csd_window_release), which keep showing the
 * last state; what is written to them from now on stays private. A step that is under way is undone.
 * Returns the error of a write that never succeeded; the engine is gone all the same. */
int csd_engine_close(csd_engine *engine, csd_error *error);

/* ---- Layout ------------------------------------------------------------- */

/* Elements [param_first, param_first + elems) of parameter `param` lie in `tile`
 * from `tile_first` on. */
typedef struct csd_piece {
  uint32_t param;
  uint32_t tile;
  uint64_t param_first;
  uint64_t tile_first;
  uint64_t elems;
} csd_piece;

typedef struct csd_tile_state {
  uint32_t slot;   /* 0 or 1: the slot that holds the tile */
  uint32_t summed; /* 1: its checksums are those of the slot's content as the engine wrote it */
} csd_tile_state;

/* A run of `n_tiles` equal tiles: the parameters that join at one time. On a file, the j-th
 * of these tiles on device d (counted from 0) has its slot s at
 * byte `file_offset[d] + (slots*j + s) * bytes`, of fp32 states `bytes` = tile_elems * sections * 4. */
typedef struct csd_extent {
  uint64_t tile_elems; /* multiple of 1024 and of the page size / 4, up to 2^31; 2^56 in all n_tiles */
  uint32_t n_tiles;
  uint32_t sections;            /* 1 to 4 states, as the rule of its parameters has them */
  uint32_t slots;               /* 2; or 1: steps write in place and cannot be undone (file only) */
  const csd_tile_state *states; /* one per tile, of a store that is there already; NULL: new */
  /* A checksum (CRC-32C) covers so many elements of a section, the last of a tile fewer: a multiple of 1024. Verifying,
   * updating and summing go chunk by chunk, so that what does not fit into the cache is fetched from memory once.
   * Of codes on a card: of 4096. */
  uint64_t sum_elems;
  const uint32_t *sums;        /* of `states`: tile by tile, chunk by chunk, one per section (of codes: up to 7) */
  const uint64_t *file_offset; /* one per device, multiples of the page size, up to 2^61 */
  const csd_piece *pieces;     /* sorted by tile, then by tile_first; tile counted from this extent's first */
  uint64_t n_pieces;
  const uint32_t *devices; /* one per tile: which it is on; NULL: tile i is on device (i mod n_devices) */
  uint32_t codec;          /* csd_codec. CSD_8BIT: of at least 4096 elements, and pieces begin at multiples of 64 */
  uint32_t param_dtype;    /* with CSD_8BIT: of all parameters */
} csd_extent;

/* Adds an extent; its tiles are numbered on from those there are. New states read as zero.
 * `windows` receives one address per section: `n_tiles * tile_elems` fp32 values each, the
 * state itself, readable and writable between steps, after csd_engine_remap: on a file the window of a
 * tile is a mapping of a slot, and csd_engine_remap maps the current one. Windows of a new extent are
 * open (see there), those of one that is there already are not. Codes have none (NULL): see csd_engine_decode. */
int csd_engine_extend(csd_engine *engine, const csd_extent *extent, float **windows, csd_error *error);

/* Unmaps one window. The caller does so when nobody can look at it any more and the engine is closed. */
void csd_window_release(float *window, uint64_t elems);

/* ---- A step ------------------------------------------------------------- */

/* Where the master of a parameter is before a step. An fp32 parameter may be its own, whoever wrote it since the last
 * step. An image of the tile's parameters has to hold it, unless it is in the tile. A card does not reach parameters:
 * there it is in the tile, into which csd_param.edited brings those of new codes. */
enum csd_master {
  CSD_IN_SECTION = 0, /* in the tile, as usual */
  CSD_FROM_PARAM = 1, /* in `param`, from where it is copied into the tile first */
  /* In `param`, and stays there: the section of the tile is not used (ram only). Of codes too, also without a gradient;
   * where 16 bits of it were set, that is the master, and the 64 elements around lose what is beyond 16 bits */
  CSD_IN_PARAM = 2,
  CSD_UNLESS_SET = 3, /* in the tile; but where `param`, of 16 bits, is not the rounded master, it is the master */
  /* In `param`, of any dtype: the tile has no state yet. Nothing is read; the master is written to the current slot, for
   * a step that is undone, and the other sections begin as zero, as they read there. All parameters of a tile are new,
   * and have gradients, or none is (file only) */
  CSD_NEW = 4,
  /* In the tile, of codes, whatever the parameter is: somebody wrote to the master, and not to the parameter */
  CSD_UNCOMPARED = 5,
  /* Elsewhere, with the other states: all of them come with csd_engine_give as they are after the step, with or without a
   * gradient, and the parameter is the caller's. What is in the tile is not read if all in it come so. Of fp32 states,
   * on files, and in memory that has two slots */
  CSD_GIVEN = 6
};

/* One of several gradients whose sum a parameter's gradient is: of all its elements, where csd_param.grad has them. */
typedef struct csd_summand {
  const void *values;
  uint32_t dtype; /* csd_dtype; of entries 16 bits */
  /* 0: `values` are one per element. Else entries (Top-K, csd_kernel.h): those of each `run_elems` elements, as of a
   * tile by themselves, have so many words, from a new multiple of that on. Who is no entry of a block counts zero. */
  uint32_t run_words;
  uint64_t run_elems;
} csd_summand;

/* One parameter of this step. `grad` NULL: it has none, and keeps every bit. */
typedef struct csd_param {
  const void *grad; /* read; alive until csd_engine_finish */
  void *param;      /* written with the rounded master. Of codes also read, with or without a gradient: what differs
                     * from the tile was set by somebody, and is the master. NULL where an image alone has it */
  uint32_t grad_dtype;
  uint32_t param_dtype;
  uint32_t hyper;  /* index into this step's hypers */
  uint32_t master; /* csd_master: where the step finds it */
  /* Top-K: of each of its pieces, csd_topk_count(topk, elems) gradients are sent, as entries (csd_kernel.h), and the
   * others are zero. 0: all of them, as they are. */
  double topk;
  void *residual; /* bf16, one per element, where `grad` has it: what is owed of the gradient; NULL: nothing ever. It
                       * stays as it is where topk is 1: then all is sent, and it may be dropped */
  uint32_t topk_dtype; /* CSD_F16 or CSD_BF16: of what is sent */
  uint32_t seed;       /* for the rounding of the residual, and of codes: another one in each step */
  uint32_t first;      /* of codes: which element of the whole parameter its first one is; what chance it has */
  /* 1: its tiles are pushed with images, which have it as it is before the step: of codes, in place of `param`, NULL */
  uint32_t in_image;
  /* Codes only: the states that somebody wrote, fp32, of all elements; NULL: those in the tile. The step begins with
   * them, rounded to nearest, also where there is no gradient. A master that the parameter is not the rounded of stays
   * all the same, but with CSD_UNLESS_SET */
  const float *edited[4];
  /* The gradient is the sum of `n_summands`, taken in fp32 in their order: then `grad` is any address, and `grad_dtype`
   * CSD_F32, which is what a device gets. Nothing of it is kept: a tile's update sums as it goes. Not with Top-K, images
   * or gradients that are named by tile. Both are read like `grad`; 0: it is at `grad`. */
  const csd_summand *summands;
  uint64_t n_summands;
} csd_param;

/* In which order the tiles of a device flow. */
enum csd_order {
  CSD_TO_AND_FRO = 0, /* as they are named, and the next step flows the other way round */
  CSD_SAME_ORDER = 1, /* as they are named, and so does the next step */
  CSD_AS_PUSHED = 2   /* as they are pushed, about as they are named, and so does the next step. None is read ahead: one
                       * that is pushed never waits for one that is not */
};

/* Begins a step over `tiles` (each once, in the order in which they are to flow) after
 * waiting for the writes of the last one. States are read ahead as far as the buffers reach. The arrays are copied.
 * Buffers keep what the next step takes first, which `order` (csd_order) says.
 * A tile without any gradient is read and written all the same, unchanged: the bare I/O of a step.
 * CSD_EINVAL, before anything is touched: a rule that there is not, or not for tiles of so many sections. */
int csd_engine_begin(csd_engine *engine, const csd_param *params, uint64_t n_params, const csd_hyper *hypers,
                     uint32_t n_hypers, const uint32_t *tiles, uint32_t n_tiles, int32_t order, csd_error *error);

/* Gives the device the gradients of one tile. With `grad` and `param` NULL they are read and written
 * where the params say. Otherwise both are images of the tile with 4 bytes per element: the piece
 * at `tile_first` has its gradients from `(char *)grad + 4 * tile_first`, in its own dtype, and its
 * parameters go to `(char *)param + 4 * tile_first`. An image has the gradients of parameters with `topk` in
 * `entries`, `n_entries` words of 32 bits as csd_kernel.h lays them out, and the caller keeps their residuals. All of
 * it stays untouched until the tile is pulled.
 * Tiles of a device should be pushed in the order in which they flow. */
int csd_engine_push(csd_engine *engine, uint32_t tile, const void *grad, void *param, const uint32_t *entries,
                    uint64_t n_entries, csd_error *error);

/* The same without images, of gradients that the params do not know: as they come, in backward. `grads`: of each piece of
 * the tile, in their order, what csd_param.grad would be; NULL: the parameter has none after all, and keeps every bit.
 * Read until the tile has its parameters (csd_engine_params_ready). CSD_EINVAL: Top-K, `in_image`, or one whose `grad` is
 * NULL. */
int csd_engine_push_grads(csd_engine *engine, uint32_t tile, const void *const *grads, csd_error *error);

/* These parameters have no gradient after all, and keep every bit: none of their tiles has been pushed. CSD_EINVAL, and
 * nothing has changed, if one has. */
int csd_engine_drop_grads(csd_engine *engine, const uint32_t *params, uint32_t n, csd_error *error);

/* States of a tile with parameters that are CSD_GIVEN, as they will be; its push follows. `states`: all its sections one
 * after another, as a slot has them, of which only pieces of these parameters are read; untouched until the tile has its
 * parameters (csd_engine_params_ready), or the step is over. */
int csd_engine_give(csd_engine *engine, uint32_t tile, const void *states, csd_error *error);

/* Waits for the parameters of one more tile pushed with an image, and says which. */
int csd_engine_pull(csd_engine *engine, uint32_t *tile, csd_error *error);

/* Do these tiles of the step have their new parameters (those pushed with an image: in the image)? With `wait`, returns
 * when they have. Reports the failure of the step, if there was one. May be called by other threads than the one that
 * finishes the step: who still waits then is told that they have, or CSD_ESTATE where the step was undone. */
int csd_engine_params_ready(csd_engine *engine, const uint32_t *tiles, uint32_t n, int32_t wait, int32_t *given,
                            csd_error *error);

/* With keep = 1, waits until every tile has its new parameters, and brings the residuals up to date; the last states
 * may still be on their way to the device (csd_engine_wait_writes waits for them). If anything failed, or with
 * keep = 0, the step is undone: every tile is back at its old slot, and the tiles whose
 * parameters had already been written are listed by csd_engine_undone, for the caller to restore.
 * CSD_ETORN: tiles with one slot had been written already; states and parameters are a mix. Tiles in memory ("ram") are
 * updated where they lie, and stay as they are: nothing fails there, and nobody should give up such a step. */
int csd_engine_finish(csd_engine *engine, int32_t keep, csd_error *error);

/* Undoes the last step although it was finished, as long as nothing but csd_engine_remap, _edited, _decode and what only
 * asks has followed: other processes could not make it. What was written to its windows since is dropped with it. The
 * tiles are those of csd_engine_undone. CSD_EINVAL, and nothing has changed: one of them has one slot, is in memory
 * ("ram"), was new, or began with what somebody had written to its windows. */
int csd_engine_take_back(csd_engine *engine, csd_error *error);

/* Tiles of the last undone step whose parameters were given out, and of each how many of its elements, from the first
 * on: all of them, unless the tile turned out to be damaged behind these. Returns how many; fills up to `n`. */
uint32_t csd_engine_undone(csd_engine *engine, uint32_t *tiles, uint64_t *elems, uint32_t n);

/* ---- A step as a guess --------------------------------------------------- */

/* A step may begin before it is known whether it will be: its gradients may change, its constants, or nobody asks for it.
 *
 *     csd_engine_begin(...)             with the rows as they will be; a `grad` that is not known yet is any address
 *       csd_engine_push_early(tile)     instead of push, for the tiles whose gradients are there
 *     csd_engine_unchanged(rows)        was all of it right? Then
 *     csd_engine_release(rows)          makes it a step like any other: push the other tiles, finish.
 *     csd_engine_finish(keep = 0)       otherwise: nothing that the caller can see has changed
 *
 * Until it is released, it writes nothing but the tiles' other slots, and memory that the caller lends. What is read of
 * the host is copied before, and compared by csd_engine_unchanged; but for what was written to states (`edited`,
 * csd_engine_edited), of which the caller knows. Tiles with images are pushed as always, also before the release: their
 * images are the caller's, and so is the comparison. */

/* Memory for csd_engine_push_early, in this step; 0: the tile is not part of it. */
uint64_t csd_engine_hold_bytes(csd_engine *engine, uint32_t tile);

/* Gives the device the gradients of one tile, by a copy. `grads`: of each piece of the tile, in their order, what
 * csd_param.grad would be, and NULL where that is; read until csd_engine_unchanged returns or the step is over. `hold`:
 * of csd_engine_hold_bytes, aligned for any type, untouched until the tile has been given (csd_engine_params_ready) or
 * the step is over. The new parameters stay there before the release: nobody is told of them, and nothing is pulled.
 * CSD_EINVAL: a tile that could not be undone (one slot, "ram", "null"), a new one (CSD_NEW), one with Top-K. */
int csd_engine_push_early(csd_engine *engine, uint32_t tile, const void *const *grads, void *hold, csd_error *error);

/* Are the gradients of the tiles that were pushed early, byte by byte, those that `params` has now, and the parameters
 * that their update reads (by their CRC-32C) what they were? `params`: all rows, as to begin. Only tells; reports the
 * failure of the step, if there was one. */
int csd_engine_unchanged(csd_engine *engine, const csd_param *params, uint64_t n_params, int32_t *unchanged,
                         csd_error *error);

/* The guess is right. `params`: all rows, as to begin but for the addresses `grad` and `param`, which are NULL where they
 * were; they are copied. The parameters of tiles that were pushed early go there: of those that are updated by now in the
 * order of `order`, of others as soon as they are. Tiles that have not begun flow in that order from now on, and behind
 * them those that it does not name. */
int csd_engine_release(csd_engine *engine, const csd_param *params, uint64_t n_params, const uint32_t *order,
                       uint32_t n_order, csd_error *error);

/* ---- Between steps -------------------------------------------------------- */

/* Waits for all writes. One that fails keeps its data in its buffer and is tried again by the next call, so nothing
 * is lost when the cause goes away. May be called by another thread. */
int csd_engine_wait_writes(csd_engine *engine, csd_error *error);

/* The same, and makes the windows show the current slots: with `open`, what is written to them goes to the device.
 * Otherwise it stays in memory, and the slot as it was, until csd_engine_edited tells of it. */
int csd_engine_remap(csd_engine *engine, int32_t open, csd_error *error);

/* Somebody wrote to the windows of these tiles. Where they are open, the tiles count as not summed until they are
 * updated or remapped. Elsewhere the next step that they are part of begins with what the windows show, and if
 * it is undone, so does the one after it. */
int csd_engine_edited(csd_engine *engine, const uint32_t *tiles, uint32_t n, csd_error *error);

/* The states of elements [first, first + n) of a tile of codes as they are now, as fp32: master, exp_avg, exp_avg_sq,
 * max_exp_avg_sq. Those that are NULL nobody wants. `first` is a multiple of 64. `param`: of CSD_IN_PARAM, these
 * elements of the parameter; else NULL. Waits for writes. Not within a step. */
int csd_engine_decode(csd_engine *engine, uint32_t tile, uint64_t first, uint64_t n, const void *param,
                      float *const *states, csd_error *error);

/* The states of a tile of fp32 as they are now, all sections one after another, as the next step would begin with them:
 * also what somebody wrote to its windows, and what the device has only if that is what was written there
 * (CSD_EDAMAGED). Waits for writes. Not within a step. */
int csd_engine_read(csd_engine *engine, uint32_t tile, void *states, csd_error *error);

/* ---- What is known of it ------------------------------------------------ */

/* `sums` as of csd_extent, for as many tiles as `states`; zeros where a tile has none. */
int csd_engine_tiles(csd_engine *engine, uint32_t first, uint32_t n, csd_tile_state *states, uint32_t *sums,
                     csd_error *error);

/* Counts of the last step (since csd_engine_begin), counted where the bytes are moved. Seconds are those
 * in which at least one operation of the kind was going on. */
typedef struct csd_stats {
  uint64_t push_bytes;
  uint64_t pull_bytes;
  uint64_t read_bytes;
  uint64_t write_bytes;
  uint64_t updated;   /* parameters */
  uint64_t nonfinite; /* gradients that are inf or nan */
  double read_seconds;
  double update_seconds;
  double write_seconds;
  uint64_t buffer_bytes;      /* fixed memory of the device's tile buffers */
  uint64_t total_write_bytes; /* since the engine was made */
  uint64_t huge_bytes;        /* of the tile buffers, on huge pages: as the system gave them; file */
  uint64_t numa;              /* 1 + the NUMA node that the tile buffers come from; 0: any */
} csd_stats;

int csd_engine_stats(csd_engine *engine, uint32_t device, csd_stats *out, csd_error *error);

/* ---- From here on: what benchmarks, tools and tests ask for ------------- */

/* ---- Devices that are timed like others --------------------------------- */

/* Rates that an emulated device does not exceed, so that it is timed like another. 0: as fast as it goes; else a rate
 * is at least 1000. What can go on at the same time does. */
struct csd_pace {
  double read, write; /* bytes of state per second, each of them by itself */
  double mixed;       /* and both together */
  double latency;     /* seconds before the first byte of each read and write of a tile; at most 3600 */
  double update;      /* parameters per second */
  double link;        /* bytes per second each way: gradients come, parameters go, at the same time. All devices of an
                       * engine that name it share it, and name the same rate */
  uint32_t host;      /* 1: the host updates its tiles, as with a plain drive. Their state goes over the link, read one
                       * way and written the other; gradients and parameters do not. 0: a CSD, which reads the
                       * parameters among codes with them, as a card does */
  uint32_t flash_grads; /* 1: gradients were put on its drive before the step. They come from there like the state, and
                       * not over the link as others do. In time alone: in truth they are read where the params say */
};

/* ---- Cards --------------------------------------------------------------- */

/* Opens a card by XRT's index ("0") or its PCIe address ("0000:65:00.1"), and loads the kernels in the file `xclbin`.
 * `kernels`: their names, with a space in between; there is one for each update rule, and others are left alone. All who
 * open a card share it. A kernel that has not come to its end after `timeout_ms` hangs, and the card is lost to this
 * process. */
int csd_card_open(const char *name, const char *xclbin, const char *kernels, uint32_t timeout_ms, csd_card **out,
                  csd_error *error);
int csd_card_close(csd_card *card, csd_error *error);
int32_t csd_card_has_p2p(const csd_card *card); /* can a drive reach its memory? */

/* Tries that out: reads a page of an O_DIRECT file on its drive at `offset`, and writes it back. Where that fails, the
 * card counts as one without P2P from now on. */
int csd_card_try_p2p(csd_card *card, int32_t fd, uint64_t offset, csd_error *error);

typedef struct csd_card_rates {
  double drive_to_card,
      card_to_drive;         /* bytes per second by P2P, as the engine moves states; 0 where there is no P2P */
  double to_card, from_card; /* bytes per second by DMA */
  double kernel;             /* parameters per second of the first of its kernels: AdamW's if it is there; fp16
                              * gradients and parameters, tiles of 1 Mi elements */
} csd_card_rates;

/* Measures a device with a card that no engine uses at the time. `bytes` of its file from `offset` on are
 * overwritten. */
int csd_card_measure(const csd_device *device, uint64_t offset, uint64_t bytes, csd_card_rates *out, csd_error *error);

/* ---- What a step did, when ----------------------------------------------- */

enum csd_event_kind { CSD_READ = 0, CSD_UPDATE = 1, CSD_WRITE = 2 };

typedef struct csd_event {
  uint32_t device;
  uint32_t tile;
  uint32_t kind; /* csd_event_kind; an update of a card, or of a paced device, has its way over the link in it */
  uint32_t reserved;
  double begin, end; /* seconds of CLOCK_MONOTONIC */
} csd_event;

/* What the last step did (since csd_engine_begin), in the order in which it ended. Returns how many events there are;
 * fills up to `n`. None are kept before the first call. */
uint32_t csd_engine_events(csd_engine *engine, csd_event *events, uint32_t n);

/* ---- The updater alone, and what it is made of --------------------------- */

/* Instruction sets of the CPU updater. All of them compute the same bits. */
enum csd_isa { CSD_ISA_SCALAR = 0, CSD_ISA_AVX2 = 1, CSD_ISA_AVX512 = 2 };

/* Updates `n` elements of each section of `state` in place, on the calling thread. `param` may be NULL where nobody
 * wants the rounded master. */
int csd_update(const csd_hyper *hyper, int32_t isa, uint64_t n, const void *grad, int32_t grad_dtype,
               float *const *state, uint32_t sections, void *param, int32_t param_dtype, csd_error *error);

/* The same on codes: `codes` has an address for each section. `key`: of the chance of the first element. */
int csd_update_codes(const csd_hyper *hyper, int32_t isa, uint64_t n, const void *grad, int32_t grad_dtype,
                     void *const *codes, uint32_t sections, void *param, int32_t param_dtype, uint32_t key,
                     csd_error *error);

/* Codes of fp32 states, to nearest, and back; as csd_param.edited and csd_engine_decode say. */
int csd_encode(int32_t isa, uint64_t n, const float *const *states, int32_t param_dtype, void *const *codes,
               uint32_t sections, csd_error *error);
int csd_decode(int32_t isa, uint64_t n, void *const *codes, int32_t param_dtype, float *const *states,
               uint32_t sections, csd_error *error);

int32_t csd_isa_best(void);                     /* the best this CPU has */
int csd_isa_use(int32_t isa, csd_error *error); /* for all engines, from the next tile on */
int32_t csd_isa_used(void);

/* Update threads shared by all engines of the process; as many as the CPUs it may run on unless set. */
int csd_threads_use(uint32_t n, csd_error *error);
uint32_t csd_threads_used(void);

/* The sum alone, on the calling thread: of elements [first, first + n) of `n_summands` gradients, at least one. */
int csd_sum(const csd_summand *summands, uint64_t n_summands, int32_t isa, uint64_t first, uint64_t n, float *sum,
            csd_error *error);

/* How many of the `n` gradients of a piece Top-K sends: max(1, n * ratio, rounded to nearest even); 0 of 0. */
uint64_t csd_topk_count(double ratio, uint64_t n);

/* The selection alone, on the calling thread, of one piece of `n` elements. Fills `indices` (ascending) and `values`
 * (16 bits, of `dtype`) of up to `k` elements, and `selected` with how many. `residual` may be NULL; `scale`:
 * grad_scale. */
int csd_topk_select(const void *grad, int32_t grad_dtype, uint64_t n, const uint16_t *residual, float scale,
                    int32_t dtype, uint64_t k, uint32_t *indices, uint16_t *values, uint64_t *selected,
                    csd_error *error);

/* CRC-32C (Castagnoli) of `bytes` bytes, continuing from `crc` (0 to begin). */
uint32_t csd_crc32c(uint32_t crc, const void *data, uint64_t bytes);

/* end of cdef */

#ifdef __cplusplus
}
#endif
#endif
