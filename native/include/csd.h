/* csd.h -- the only interface between csd_optim's Python code and its native engine.
 *
 * A *device* is a computational storage device (CSD), real or emulated. It keeps
 * an optimizer's fp32 state and updates it. An *engine* drives several devices as one:
 *
 *     csd_engine_create(devices)           once
 *     csd_engine_extend(parameters)        whenever parameters are added
 *     csd_engine_begin(...)                each step: the devices start to read states,
 *       csd_engine_push(tile, ...)         gradients go to the devices,
 *       csd_engine_pull(&tile)             updated parameters come back,
 *     csd_engine_finish(...)               the step is complete (or undone)
 *     csd_engine_close()
 *
 * The smallest complete step: AdamW on one parameter, in one tile of an in-memory device (adamw.h lists the constants).
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
 *           csd_engine_push(engine, tile, NULL, &error) ||
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
 * I/O and of update. A tile's state consists of one to four *sections* of `elems` fp32 values each; for AdamW
 * [master | exp_avg | exp_avg_sq (| max_exp_avg_sq)]. A tile may store 8-bit *codes* of these values instead
 * (csd_codec). A tile has two *slots* on its device: a step reads one and writes the other, so the old state stays
 * intact until the next step.
 *
 * Unless stated otherwise, a function returns 0, or a negative csd_status; on failure it also fills `*error` if `error`
 * is not NULL. Lengths and offsets are in elements unless the name says bytes. An engine runs one step at a time;
 * different engines may be used from different threads. */
#ifndef CSD_H
#define CSD_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* cdef: native/build.py passes everything from here on to cffi as it stands. */

enum csd_status {
  CSD_OK = 0,
  CSD_EINVAL = -1, /* an argument is wrong; nothing was changed */
  CSD_EIO = -2,    /* a system call failed with `os_errno` */
  CSD_ENOMEM = -3,
  CSD_ESTATE = -4,   /* called out of order */
  CSD_EDAMAGED = -5, /* a tile's content does not match its checksums */
  CSD_ETORN = -6,    /* an in-place step failed midway: its writes cannot be undone */
  CSD_EDEVICE = -7   /* a card is unusable or has been lost; `os_errno` may say why */
};

typedef struct csd_error {
  int32_t status;
  int32_t os_errno; /* 0 if the failure did not come from the operating system */
  int32_t device;   /* index of the device, or -1 */
  int32_t tile;     /* index of the damaged tile, or -1 */
  char text[240];   /* what happened and where; NUL-terminated */
} csd_error;

enum csd_dtype { CSD_F32 = 0, CSD_F16 = 1, CSD_BF16 = 2 };

/* The update rules. Each has a header in this directory that documents its constants and sections; rules.h lists
 * all rules. With every rule, the first section of a tile is the fp32 master. */
enum csd_rule {
  CSD_ADAMW = 0,   /* adamw.h */
  CSD_AMSGRAD = 1, /* AdamW that divides by the root of exp_avg_sq's running maximum, kept in a fourth section */
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

/* Update rules for one of two passes over a tile: see CSD_PASS_2. They are not in csd_rule, as none is the whole rule of
 * a parameter. The constants in csd_hyper.c, which the caller computes in double and rounds once (a constant that is not
 * listed is not read):
 *
 *     CSD_MUON_MOMENTUM   c[0]  1 - momentum
 *                         c[1]  momentum
 *                         c[2]  not 0: Nesterov
 *                         c[8]  CSD_GRAD_SCALE
 *     CSD_MUON_APPLY      c[0]  1 - lr * weight_decay
 *                         c[1]  lr * ratio, by which O is multiplied */
enum csd_pass_rule {
  CSD_MUON_MOMENTUM = 64, /* muon.h. Pass 1 over master, momentum_buffer */
  CSD_MUON_APPLY = 65     /* pass 2 */
};

/* How a tile stores its states. */
enum csd_codec {
  CSD_FP32 = 0, /* as fp32, one section per state */
  /* As 8-bit codes of AdamW's states (codec.h). Each section begins on a page of 4096 bytes. The sections are: the
   * 16-bit parameter and its correction (1 byte), or the fp32 master; ratio and root (1 byte each); exponent (1 byte
   * per 64 elements); and for max_exp_avg_sq, peak (1 byte) and its exponent (1 byte per 64 elements) */
  CSD_8BIT = 1,
  /* Likewise, of one state that is a second moment, such as Adagrad's sum: the parameter and its correction, or the
   * master; root; exponent. Tiles have two states */
  CSD_ROOT = 2,
  /* Likewise, of one state that is a momentum: linear (1 byte), in place of root. A rule with it takes two passes */
  CSD_LINEAR = 3
};

/* Index into csd_hyper.c, the same for every rule, of the factor by which gradients are multiplied (1/loss scale,
 * clipping, -1 to maximize). */
#define CSD_GRAD_SCALE 8

/* The constants of one parameter's update in one step. */
typedef struct csd_hyper {
  uint32_t rule; /* csd_rule, or csd_pass_rule */
  float c[9];    /* in the order that the rule's header gives */
} csd_hyper;

/* ---- Devices ------------------------------------------------------------ */

/* The default queue depth per file system, shared by all engines and devices on it; a device may ask for more. Four
 * requests of a megabyte already saturate the drives we measured; eight keep both reads and writes in flight. */
#define CSD_IO_DEPTH 8

/* The FPGA of a SmartSSD, driven through the Xilinx runtime (XRT). XRT is loaded when the first card is opened. */
typedef struct csd_card csd_card;

/* Upper limits on the speed of an emulated device; defined near the end of this file. */
typedef struct csd_pace csd_pace;

/* Transfers between drive and card: peer-to-peer (P2P) if it works, always P2P, or always through host memory. */
enum csd_p2p { CSD_P2P_AUTO = 0, CSD_P2P_ON = 1, CSD_P2P_OFF = 2 };

typedef struct csd_device {
  /* "file": tiles in a file; "xrt": in a file on a SmartSSD's drive; "null": stores nothing;
   * "ram": in memory, updated in place; or if `buffers` > 0, in the slots of `fd`, an in-memory file (memfd_create) */
  const char *backend;
  int32_t fd;           /* file, xrt: open for reading and writing; the caller owns it and closes it after the engine */
  uint32_t buffers;     /* file, xrt: number of tile buffers, allocated once; with 1, nothing overlaps */
  uint64_t block_bytes; /* file, xrt: size of one I/O request, a multiple of 4096, up to 1 GiB */
  csd_card *card;       /* xrt: the caller owns it and closes it after the engine */
  uint32_t p2p;         /* xrt: csd_p2p */
  const csd_pace *pace; /* not xrt; read only by csd_engine_create. NULL: no limit */
  uint32_t depth;       /* file, xrt: queue depth of its file system; at least CSD_IO_DEPTH is used */
  /* file: memory for additional buffers. A buffer keeps the tile last written from it until the buffer is reused, and
   * a step does not read a tile that a buffer still holds. -1: keep nothing, read every tile */
  int64_t cache_bytes;
  /* file: 1 + the NUMA node of its drive, 0: any. Where the system allows it, the buffers are allocated on this node
   * and its CPUs update the tiles */
  uint32_t numa;
} csd_device;

typedef struct csd_engine csd_engine;

int csd_engine_create(const csd_device *devices, uint32_t n_devices, csd_engine **out, csd_error *error);

/* Waits for all writes, then stops and frees everything but the windows (see csd_window_release). They keep showing the
 * last state, but writes to them stay private to the process from now on. A step in progress is undone.
 * Returns the error of a write that never succeeded; the engine is freed in any case. */
int csd_engine_close(csd_engine *engine, csd_error *error);

/* ---- Layout ------------------------------------------------------------- */

/* The least elements of a tile, and of a section that one checksum covers; both are multiples of it. 4 KiB of fp32. */
#define CSD_MIN_GRAIN 1024

/* Elements [param_first, param_first + elems) of parameter `param` are stored in `tile`, starting at its element
 * `tile_first`. */
typedef struct csd_piece {
  uint32_t param;
  uint32_t tile;
  uint64_t param_first;
  uint64_t tile_first;
  uint64_t elems;
} csd_piece;

typedef struct csd_tile_state {
  uint32_t slot;   /* 0 or 1: the slot that holds the current state */
  uint32_t summed; /* 1: the checksums are valid, computed when the engine wrote the slot */
} csd_tile_state;

/* A run of `n_tiles` equal tiles, for parameters that are added together. In a file, the j-th
 * of these tiles on device d (counted from 0) has its slot s at
 * byte `file_offset[d] + (slots*j + s) * bytes`; for fp32 states, `bytes` = tile_elems * sections * 4. */
typedef struct csd_extent {
  uint64_t tile_elems; /* multiple of CSD_MIN_GRAIN and the page size / 4, up to 2^31; n_tiles together up to 2^56 */
  uint32_t n_tiles;
  uint32_t sections;            /* number of states, 1 to 4, as the rule of the parameters requires */
  uint32_t slots;               /* 2; or 1: steps write in place and cannot be undone (file only) */
  const csd_tile_state *states; /* one per tile, when opening an existing store; NULL: the extent is new */
  /* Elements of a section covered by one checksum (CRC-32C), a multiple of CSD_MIN_GRAIN (for codes on a card, of 4096);
   * the last chunk of a tile may be shorter. The engine verifies, updates and sums chunk by chunk, so that a tile larger
   * than the cache is fetched from memory only once. */
  uint64_t sum_elems;
  const uint32_t *sums;        /* with `states`: by tile, then by chunk, one per section (for codes: up to 7) */
  const uint64_t *file_offset; /* one per device, multiples of the page size, up to 2^61 */
  const csd_piece *pieces;     /* sorted by tile, then by tile_first; `tile` counts from this extent's first tile */
  uint64_t n_pieces;
  const uint32_t *devices; /* one per tile: the device that stores it; NULL: tile i is on device (i mod n_devices) */
  uint32_t codec;          /* csd_codec. Codes: tile_elems is a multiple of 4096; pieces begin at multiples of 64 */
  uint32_t param_dtype;    /* with codes: the dtype of all parameters */
} csd_extent;

/* Adds an extent. Its tiles are numbered after the existing ones; new states read as zero.
 * `windows` receives one address per section, each of `n_tiles * tile_elems` fp32 values: the
 * state itself, readable and writable between steps, after csd_engine_remap. On a file, the window of a
 * tile is a memory mapping of a slot, and csd_engine_remap maps the current slot. Windows of a new extent are
 * open (see csd_engine_remap); those of an existing store are not. Codes have no windows (NULL): use
 * csd_engine_decode. */
int csd_engine_extend(csd_engine *engine, const csd_extent *extent, float **windows, csd_error *error);

/* Unmaps one window. Call this only after the engine is closed and no reference to the window is left. */
void csd_window_release(float *window, uint64_t elems);

/* ---- A step ------------------------------------------------------------- */

/* Where the master of a parameter is before a step. An fp32 parameter may be its own master, and then includes whatever
 * the user has written to it since the last step. A tile that is pushed with an image has the parameters in the image,
 * so the image must hold the master unless the master is in the tile. A card cannot reach parameters: its masters are
 * always in the tile, and csd_param.edited supplies the masters of new codes. */
enum csd_master {
  CSD_IN_SECTION = 0, /* in the tile, as usual */
  CSD_FROM_PARAM = 1, /* in `param`, and copied from there into the tile first */
  /* In `param`, where it stays: the tile's section is not used (ram only). This holds for codes too, also without a
   * gradient. If the user has set a 16-bit parameter, its value is the master, and all 64 elements of its group lose
   * the bits beyond 16 */
  CSD_IN_PARAM = 2,
  CSD_UNLESS_SET = 3, /* in the tile; but an element whose 16-bit `param` is not the rounded master takes `param` */
  /* In `param`, of any dtype: the tile has no state yet. Nothing is read. The master is written to the current slot, in
   * case the step is undone; the other sections begin as zeros, which is how that slot reads. Either all parameters of
   * a tile are new and have gradients, or none is new (file only) */
  CSD_NEW = 4,
  /* In the tile, as codes, whatever value the parameter has: the user has written to the master and not to `param` */
  CSD_UNCOMPARED = 5,
  /* Computed by the caller, like all other states: the tile is pushed with all states as they are after the step, with
   * or without a gradient (csd_push.states), and the caller updates the parameter. A tile whose states are all supplied
   * is not read. On files and in memory with two slots */
  CSD_SUPPLIED = 6
};

/* Records of the changes that steps make to parameters: see csd_changes_create. */
typedef struct csd_changes csd_changes;

/* A parameter whose updates record its changed elements (their 16 bits differ from those after the last update), with
 * the new values. A parameter of 32 bits counts as its master, rounded to bfloat16. For fp32 states and 16 bits, "after
 * the last update" is the rounded master before the step, so a parameter that was set from outside makes no difference.
 * Elsewhere the bits before the update are compared, and `checks` reveal values that were set from outside.
 * The caller owns this struct, and must not touch it during a step. CPU updates only; for others see csd_watch_note. */
typedef struct csd_watch {
  csd_changes *changes;
  uint32_t param;      /* names the parameter in the records */
  uint32_t whole;      /* 1: all elements are recorded, and count as 0 before */
  uint32_t sum;        /* by how much the checksum of the parameter (docs/publish-format.md) changes, modulo 2^32 */
  uint32_t first_tile; /* index of the parameter's first tile; the rest follow it */
  uint64_t first;      /* index of its first element in the tensor that records and checksum refer to */
  uint64_t updated;    /* number of elements that were updated */
  /* For each of its tiles, the index in `checks` of its first group of 64 elements there; groups are those of the tile.
   * A step reads `checks`, and writes `new_checks`. All NULL: for fp32 states and 16 bits */
  const uint64_t *groups;
  const uint32_t *checks;
  uint32_t *new_checks;
} csd_watch;

/* One parameter in this step. With `grad` NULL it has no gradient and keeps every bit. */
typedef struct csd_param {
  const void *grad; /* read; must stay valid until csd_engine_finish */
  void *param;      /* receives the rounded master. For codes it is also read, with or without a gradient: a value that
                     * differs from the tile was set by the user and becomes the master. NULL if it is only in an
                     * image */
  uint32_t grad_dtype;
  uint32_t param_dtype;
  uint32_t hyper;  /* index into this step's hypers */
  uint32_t master; /* csd_master: where the step finds the master */
  /* Top-K ratio: for each piece, csd_topk_count(topk, elems) gradients are sent, as entries (csd_kernel.h); the others
   * count as zero. 0: no Top-K, all gradients are sent. */
  double topk;
  void *residual; /* bf16, one per element, in the order of `grad`: the part of earlier gradients that was not sent yet;
                   * NULL: no error feedback. With topk = 1 everything is sent: the residual is not updated and may be
                   * dropped */
  uint32_t topk_dtype; /* CSD_F16 or CSD_BF16: dtype of the gradients that are sent */
  uint32_t seed;       /* for the stochastic rounding of residuals and codes; must differ from step to step */
  uint32_t first;      /* codes: index of its first element within the whole parameter, for the stochastic rounding */
  /* 1: its tiles are pushed with images that hold the parameter as it is before the step. For codes, the image replaces
   * `param`, which is NULL */
  uint32_t in_image;
  /* fp32 states that the user has written, for all elements; NULL: the states in the tile. The step begins with these
   * states, also without a gradient; codes of them are rounded to nearest. An edited master is kept even if the
   * parameter is not its rounded value, except with CSD_UNLESS_SET */
  const float *edited[4];
  csd_watch *watch; /* NULL: nothing is recorded */
} csd_param;

/* The order in which a device processes its tiles. The engine keeps in its buffers the tiles that the next step is
 * expected to process first. */
enum csd_order {
  CSD_TO_AND_FRO = 0, /* as listed; the next step is expected in the reverse order */
  CSD_SAME_ORDER = 1, /* as listed; the next step is expected in the same order */
  CSD_AS_PUSHED = 2   /* as pushed, which should roughly follow the list, also in the next step. No tile is read ahead,
                       * so a tile that is pushed never waits for one that is not */
};

/* Or-ed with the index of a tile: the second of two passes over it, for a rule that needs more than the tile between
 * them. Muon's update of a matrix is orthogonalized as a whole, by the caller:
 *
 *     csd_engine_begin(..., {0, 1, 0 | CSD_PASS_2, 1 | CSD_PASS_2}, ...)
 *       csd_engine_push(0), (1)             gradients; the momentum is updated
 *       csd_engine_params_ready({0, 1})     the caller has X, the matrix to be orthogonalized: X becomes O
 *       csd_engine_push(0 | CSD_PASS_2),    O; the master is updated, and so the parameter
 *         (1 | CSD_PASS_2)
 *     csd_engine_finish()
 *
 * Each pass is pushed like a tile, and reads and writes only its half of the slot: pass 1 all states but the master, pass
 * 2 the master. Together they move as many bytes as a rule with one pass. Once both halves are written, the other slot
 * is current; until then, and if the step is undone at any time, the tile has its old state.
 *
 * The step's table has two rows per parameter: `n_params` is twice the number of parameters, and those of second passes
 * are in its second half. In the first row, `grad` is the gradient and `param` receives X, of any dtype; in the second
 * one, `grad` is O, of any dtype, and `param` the parameter. A parameter has a gradient in both rows or in none. `master`
 * belongs to the second row, `edited` to the row whose pass has the state. Rows of other parameters are in the first half;
 * their second rows are not read.
 *
 * List a second pass after its first one, and after the first passes of all tiles with parts of the same matrices. The
 * first passes of the next matrices may come before it, so that they are read while the caller computes O. A pass that is
 * listed has its buffer before those listed later, and keeps it until it is pushed. So wait for a pass only when all that
 * are listed before it have been pushed: then a step cannot deadlock, however few buffers there are.
 *
 * All parameters in such a tile take two passes. Its states are fp32, or codes of CSD_LINEAR, which the halves divide as
 * they do states. They are in two slots; that excludes "ram" without buffers, since what the caller does between the
 * passes can fail. Cards have no kernels for passes. No buffer keeps half a slot for the next step. CSD_SUPPLIED, Top-K and
 * csd_push.hold are refused. csd_engine_undone lists the tile if pass 2 has written parameters; csd_stats counts the
 * bytes of both passes, `updated` in pass 2, and `nonfinite` in pass 1. */
#define CSD_PASS_2 0x80000000u

/* Begins a step over `tiles` (each listed once, or once for each of two passes, in the order of processing) after
 * waiting for the writes of the last step. States are read ahead as far as there are buffers. The arrays are copied.
 * `order`: csd_order.
 * A tile without any gradient is read and written back unchanged, which gives the bare I/O of a step.
 * Returns CSD_EINVAL, before anything is changed, for an unknown rule or one that does not fit a tile's sections. */
int csd_engine_begin(csd_engine *engine, const csd_param *params, uint64_t n_params, const csd_hyper *hypers,
                     uint32_t n_hypers, const uint32_t *tiles, uint32_t n_tiles, int32_t order, csd_error *error);

/* How a tile is pushed. With all fields zero, gradients are read from and parameters written to the addresses in
 * csd_param. The caller must not touch what the fields point to until the tile's parameters are ready
 * (csd_engine_pull for images, csd_engine_params_ready) or the step is over, unless a field says otherwise. This struct
 * itself is read during the call only. */
typedef struct csd_push {
  /* *Images* of the tile with 4 bytes per element, both or neither: the piece at `tile_first` has its gradients at
   * `(char *)grad + 4 * tile_first`, in its own dtype, and its parameters go to `(char *)param + 4 * tile_first`. */
  const void *grad;
  void *param;
  /* With images, the gradients of parameters with `topk`: `n_entries` words of 32 bits as csd_kernel.h lays them out.
   * The caller maintains the residuals of these parameters. */
  const uint32_t *entries;
  uint64_t n_entries;
  /* Instead of images: for each piece of the tile in order, the address that csd_param.grad would have. It may be
   * unknown at csd_engine_begin, while backward is still producing it. NULL: the parameter has no gradient after all,
   * and keeps every bit. Not for parameters with Top-K, `in_image` or CSD_SUPPLIED; and a parameter whose
   * csd_param.grad is NULL has none here. The array itself is copied. */
  const void *const *grads;
  /* Pushes the tile *early*, as part of a guess (see below): memory of csd_engine_hold_bytes bytes, aligned for any
   * type. Then `grads` is needed too, and NULL exactly where csd_param.grad is. */
  void *hold;
  /* All states of the tile after the step, in the layout of a slot. Set if and only if the tile has CSD_SUPPLIED parameters;
   * only the pieces of these are read. */
  const void *states;
} csd_push;

/* Gives the device the gradients of one tile, and so lets it update the tile. `how` NULL: all fields are zero. The tiles
 * of a device should be pushed in the order in which they are processed. */
int csd_engine_push(csd_engine *engine, uint32_t tile, const csd_push *how, csd_error *error);

/* Declares that these parameters have no gradient after all: they keep every bit. Returns CSD_EINVAL, and changes
 * nothing, if one of their tiles has already been pushed. */
int csd_engine_drop_grads(csd_engine *engine, const uint32_t *params, uint32_t n, csd_error *error);

/* Waits until another tile that was pushed with an image has its new parameters, and returns its index in `*tile`. */
int csd_engine_pull(csd_engine *engine, uint32_t *tile, csd_error *error);

/* Returns whether csd_engine_pull would not wait: 1 or 0. One call asks for all tiles in flight. */
int csd_engine_would_pull(csd_engine *engine);

/* Sets `*given` to whether all these tiles have their new parameters (for tiles pushed with an image: in the image).
 * With `wait`, returns only when they have. If the step has failed, returns its error. May be called while another
 * thread finishes the step: a thread still waiting then returns with `*given` = 1, or with CSD_ESTATE if the step was
 * undone. */
int csd_engine_params_ready(csd_engine *engine, const uint32_t *tiles, uint32_t n, int32_t wait, int32_t *given,
                            csd_error *error);

/* With keep = 1, waits until every tile has its new parameters, and updates the residuals; writes of the last states
 * may still be in flight (csd_engine_wait_writes waits for them). If anything failed, or with
 * keep = 0, the step is undone: every tile goes back to its old slot, and csd_engine_undone lists the tiles whose
 * parameters had already been written, for the caller to restore.
 * Returns CSD_ETORN if tiles with one slot had already been written: states and parameters are then partly old, partly
 * new. Tiles of "ram" without buffers are updated in place and keep their new state. Their updates cannot fail, and the
 * caller should not undo such a step. */
int csd_engine_finish(csd_engine *engine, int32_t keep, csd_error *error);

/* Undoes the last step although it was finished, for example because other ranks failed to complete it. Since then only
 * csd_engine_remap, _edited, _decode and functions that only query may have been called. Anything written to the
 * windows of its tiles since then is lost. csd_engine_undone lists the tiles. Returns CSD_EINVAL, and changes nothing,
 * if one of the tiles has one slot, is updated in place ("ram" without buffers), was new, or began the step with what
 * the user had written to its windows. */
int csd_engine_take_back(csd_engine *engine, csd_error *error);

/* Makes the other slots of `n` tiles, each given once, the current ones: states go back to before the last step that
 * updated or copied the tiles. Later writes to the slots left, also through windows, are lost; the windows of the tiles
 * show the new current slots, and are closed. Between steps only. Returns CSD_EINVAL, and changes nothing, if a tile
 * has one slot or is updated in place; CSD_EIO or CSD_ENOMEM if a window could not be mapped: csd_engine_remap tries
 * again. */
int csd_engine_go_back(csd_engine *engine, const uint32_t *tiles, uint32_t n, csd_error *error);

/* Gives back `n` tiles whose parameters are all gone: frees their memory. Their windows read as zeros, and the caller
 * may reuse their slots for other tiles. Freed tiles belong to no further step, have no checksums, and count as none
 * of csd_engine_tiles' states. Once all tiles of an extent are freed, the caller may unmap its windows. Between steps
 * only. Returns CSD_EINVAL, and changes nothing, for a tile that does not exist. */
int csd_engine_free_tiles(csd_engine *engine, const uint32_t *tiles, uint32_t n, csd_error *error);

/* Returns memory that is not in use to the system. The allocator keeps all memory below a block in use. */
void csd_trim_memory(void);

/* Frees the blocks of whole pages of a file, which then reads as zeros there and keeps its size. Returns 0 or an errno:
 * EOPNOTSUPP where the file system cannot do that. */
int csd_punch_hole(int fd, uint64_t offset, uint64_t bytes);

/* Lists the tiles of the last undone step whose parameters had been written, and for each the number of leading
 * elements written: all, unless the rest of the tile turned out to be damaged. Returns the number of tiles; fills up to
 * `n`. */
uint32_t csd_engine_undone(csd_engine *engine, uint32_t *tiles, uint64_t *elems, uint32_t n);

/* ---- A speculative step (a guess) ----------------------------------------- */

/* A step may begin speculatively, as a *guess*: its gradients or constants may still change, or it may never be wanted.
 *
 *     csd_engine_begin(...)             with the rows (csd_param) as expected; an unknown `grad`: any non-NULL address
 *       csd_engine_push(tile, hold)     early, for the tiles whose gradients are available
 *     csd_engine_unchanged(rows)        checks whether the guess was right. If so,
 *     csd_engine_release(rows)          makes it an ordinary step: push the other tiles, finish.
 *     csd_engine_finish(keep = 0)       otherwise: nothing that the caller can see has changed
 *
 * Until the release, the step writes only to the tiles' other slots and to memory lent by the caller. It copies all
 * data read from host memory, and csd_engine_unchanged compares the copies. The exceptions are writes to states
 * (`edited`, csd_engine_edited): the caller keeps track of those. A tile with images is pushed as usual even before the
 * release: the caller owns its images and does the comparison.
 *
 * A tile that is pushed early has its gradients read until csd_engine_unchanged returns or the step is over. Until the
 * release, its new parameters stay in `hold`; neither csd_engine_params_ready nor csd_engine_pull reports them. Some
 * tiles cannot be pushed early (CSD_EINVAL): if the step cannot be undone on them (one slot, "ram" in place, "null"),
 * if they are new (CSD_NEW), or if csd_push.grads refuses a parameter, or one has a gradient but no `param`. */

/* Returns how many bytes csd_push.hold needs for this tile in this step; 0: the tile is not part of it, or takes two
 * passes. */
uint64_t csd_engine_hold_bytes(csd_engine *engine, uint32_t tile);

/* Sets `*unchanged` to whether the guess still holds for the tiles that were pushed early: their rows and gradients are
 * byte for byte those in `params` now, and the parameters that their updates read have the same CRC-32C. `params`: all
 * rows, as passed to begin. Changes nothing. If the step has failed, returns its error. */
int csd_engine_unchanged(csd_engine *engine, const csd_param *params, uint64_t n_params, int32_t *unchanged,
                         csd_error *error);

/* Confirms the guess: from now on this is an ordinary step. `params`: all rows as passed to begin, copied; only the
 * addresses `grad` and `param` may differ, and must be NULL where they were NULL. The new parameters of tiles that were
 * pushed early are copied to `param`: first of the tiles that are already updated, in the order of `order`, then of
 * each other tile as soon as it is updated. Tiles that have not begun are processed in the order of `order`, followed
 * by tiles not in `order`. Tiles that have begun may have a buffer each, and keep it until they are pushed: before
 * waiting for a tile, push all tiles that began before it in the guess's order. */
int csd_engine_release(csd_engine *engine, const csd_param *params, uint64_t n_params, const uint32_t *order,
                       uint32_t n_order, csd_error *error);

/* ---- Between steps -------------------------------------------------------- */

/* Waits for all writes. A write that fails keeps its data in its buffer, and the next call retries it, so nothing
 * is lost once the cause is gone. May be called from another thread. */
int csd_engine_wait_writes(csd_engine *engine, csd_error *error);

/* Waits for all writes, then makes the windows show the current slots. With `open`, writes to a window go to the
 * device. Otherwise they stay in memory and the slot does not change; csd_engine_edited must report them. */
int csd_engine_remap(csd_engine *engine, int32_t open, csd_error *error);

/* Reports that the user has written to the windows of these tiles. If the windows are open, the tiles count as not
 * summed until they are updated or remapped. Otherwise the next step that includes such a tile begins with the states
 * in its window; if this step is undone, the next step begins with them, too. */
int csd_engine_edited(csd_engine *engine, const uint32_t *tiles, uint32_t n, csd_error *error);

/* Reads the current states of elements [first, first + n) of a tile, as fp32: the master, then the others in the order
 * of the tile's sections; codes are decoded. Verifies what it reads from a device (CSD_EDAMAGED). A state whose address
 * is NULL is skipped. For codes, `first` is a multiple of 64. `param`: for codes with CSD_IN_PARAM, these elements of the
 * parameter; otherwise NULL. Waits for writes. Not allowed during a step. */
int csd_engine_decode(csd_engine *engine, uint32_t tile, uint64_t first, uint64_t n, const void *param,
                      float *const *states, csd_error *error);

/* Reads the first `sections` sections of a tile's current slot, as the next step would begin with them. This includes
 * what the user has written to the windows. Codes are read as they are, but not on a resident device. Of what is read from the device, the first `elems`
 * elements of each section are verified against their checksums (CSD_EDAMAGED). A device that fails is reported as
 * CSD_EIO, even if the states have to be read through a window. Waits for writes. Not allowed during a step. */
int csd_engine_read(csd_engine *engine, uint32_t tile, uint32_t sections, uint64_t elems, void *states,
                    csd_error *error);

/* ---- What steps change ---------------------------------------------------- */

/* Elements [first, first + elems) of a watched tensor were updated, and `count` of them were recorded. */
typedef struct csd_change {
  uint32_t param; /* csd_watch.param */
  uint32_t count;
  uint64_t first, elems;
  uint64_t at; /* where the record begins in the file */
} csd_change;

/* Makes a list of records, in a file of its own. The caller owns `fd`, and closes it after csd_changes_free. */
int csd_changes_create(int32_t fd, csd_changes **out, csd_error *error);
void csd_changes_free(csd_changes *changes);

/* Returns the number of records, and fills up to `n` of them. Within a step their order is any; steps follow one
 * another. `*os_errno`: why a record is missing since the last csd_changes_rewind, or 0. */
uint64_t csd_changes_list(const csd_changes *changes, csd_change *records, uint64_t n, int32_t *os_errno);

/* Drops all but the first `n` records, such as those of a step that was undone. */
void csd_changes_rewind(csd_changes *changes, uint64_t n);

/* A block of docs/publish-format.md: elements [first, first + elems) of a parameter, at most 65536. */
typedef struct csd_block {
  uint64_t first, elems;
  uint64_t record;  /* index of the block's first record; the next block's records follow its last one */
  uint64_t payload; /* set by csd_changes_encode, like the next two: where its payload begins */
  uint32_t kind, count;
} csd_block;

/* Encodes blocks one after another, the payload of each at a multiple of 8. `records`: those of the first block in the
 * order of the steps, then those of the next one; the last block's end at `n_records`. A record that reaches into two
 * blocks is named for both. `payload` has room for 2 * elems + elems / 8 + 16 bytes per block; its used size is returned
 * in `*bytes`. */
int csd_changes_encode(const csd_changes *changes, const csd_change *records, uint64_t n_records, csd_block *blocks,
                       uint64_t n_blocks, void *payload, uint64_t *bytes, csd_error *error);

/* Records what a step has changed in a piece of a watched parameter that was updated elsewhere, as the updates of this
 * process do. `before` and `after`: its elements before and after the step, of this dtype; `before` is not read if all
 * are recorded (`whole`). `tile`: the number of its tile over all extents. The watch has checks. May run on several
 * threads for different pieces. */
void csd_watch_note(csd_watch *watch, uint32_t tile, const csd_piece *piece, uint32_t dtype, const void *before,
                    const void *after);

/* Returns the checksum of `n` values of a parameter, of which the first is element `first`. */
uint32_t csd_changes_sum(const uint16_t *values, uint64_t first, uint64_t n);

/* ---- Information about an engine ----------------------------------------- */

/* Returns slots and checksums of tiles [first, first + n). `sums` is laid out as in csd_extent; zeros for a tile that
 * is not summed. */
int csd_engine_tiles(csd_engine *engine, uint32_t first, uint32_t n, csd_tile_state *states, uint32_t *sums,
                     csd_error *error);

/* Statistics of the last step (since csd_engine_begin), counted where the bytes are moved. A number of seconds is the
 * time during which at least one operation of that kind was in progress. */
typedef struct csd_stats {
  uint64_t push_bytes;
  uint64_t pull_bytes;
  uint64_t read_bytes;
  uint64_t write_bytes;
  uint64_t updated;   /* parameter elements */
  uint64_t nonfinite; /* gradient elements that are inf or nan */
  double read_seconds;
  double update_seconds;
  double write_seconds;
  uint64_t buffer_bytes;      /* fixed memory of the device's tile buffers */
  uint64_t total_write_bytes; /* since the engine was created */
  uint64_t huge_bytes;        /* file: part of the tile buffers that the system has put on huge pages */
  uint64_t numa;              /* 1 + the NUMA node preferred for the tile buffers; 0: any */
} csd_stats;

int csd_engine_stats(csd_engine *engine, uint32_t device, csd_stats *out, csd_error *error);

/* ---- From here on: for benchmarks, tools and tests ----------------------- */

/* ---- Paced devices: emulation of another device's timing ------------------ */

/* Rates that an emulated device does not exceed, so that its steps take as long as those of another device. 0: no
 * limit; otherwise a rate is at least 1000. Operations that can overlap do overlap. */
struct csd_pace {
  double read, write;   /* bytes of state per second, for reads and for writes */
  double mixed;         /* bytes of state per second, for reads and writes together */
  double latency;       /* seconds before the first byte of each read and write of a tile; at most 3600 */
  double update;        /* parameter elements per second */
  double link;          /* bytes per second in each direction, full duplex: gradients to the device, parameters from it.
                       * All devices of an engine that set it share one link and must set the same rate */
  uint32_t host;        /* 1: the host updates the tiles, as with a plain drive: state crosses the link, read in one
                       * direction and written in the other; gradients and parameters do not. 0: a CSD, which reads the
                       * parameter section of codes from its drive, as a card does */
  uint32_t flash_grads; /* 1: models gradients that were written to its drive before the step: they are read like the
                       * state instead of crossing the link. This changes the timing only: the data still comes from
                       * the addresses in csd_param */
};

/* ---- Cards --------------------------------------------------------------- */

/* Opens a card by XRT's index ("0") or its PCIe address ("0000:65:00.1"), and loads the file `xclbin`. `kernels`: the
 * names of the kernels to open in it, separated by spaces; there is one per update rule, and other kernels are ignored.
 * Opening a card again shares it within the process. A kernel that has not finished after `timeout_ms` milliseconds is
 * considered hung, and the card is then lost to this process. */
int csd_card_open(const char *name, const char *xclbin, const char *kernels, uint32_t timeout_ms, csd_card **out,
                  csd_error *error);
int csd_card_close(csd_card *card, csd_error *error);
int32_t csd_card_has_p2p(const csd_card *card); /* can a drive reach its memory? */

/* Tries out P2P: reads the page at `offset` of an O_DIRECT file on the card's drive, and writes it back. If that fails,
 * the card counts as having no P2P from now on. */
int csd_card_try_p2p(csd_card *card, int32_t fd, uint64_t offset, csd_error *error);

typedef struct csd_card_rates {
  double drive_to_card, card_to_drive; /* bytes per second by P2P, as the engine moves states; 0 without P2P */
  double to_card, from_card;           /* bytes per second by DMA */
  double kernel;                       /* elements per second of its first kernel (AdamW's if there is one), with fp16
                              * gradients and parameters and tiles of 1 Mi elements */
} csd_card_rates;

/* Measures a device with a card. No engine may use the card meanwhile. Overwrites `bytes` bytes of the device's file,
 * starting at `offset`. */
int csd_card_measure(const csd_device *device, uint64_t offset, uint64_t bytes, csd_card_rates *out, csd_error *error);

/* ---- Trace of a step ------------------------------------------------------ */

enum csd_event_kind { CSD_READ = 0, CSD_UPDATE = 1, CSD_WRITE = 2 };

typedef struct csd_event {
  uint32_t device;
  uint32_t tile;
  uint32_t kind; /* csd_event_kind; the update of a card or of a paced device includes the transfers over the link */
  uint32_t reserved;
  double begin, end; /* seconds of CLOCK_MONOTONIC */
} csd_event;

/* Returns the number of events of the last step (since csd_engine_begin), and fills up to `n` of them, ordered by their
 * end. The first call turns recording on; earlier events are not kept. */
uint32_t csd_engine_events(csd_engine *engine, csd_event *events, uint32_t n);

/* ---- The CPU updater and its building blocks ------------------------------ */

/* A row of rules.h. */
typedef struct csd_rule_row {
  uint32_t number;  /* csd_rule or csd_pass_rule */
  uint32_t of_pass; /* 1 or 2: a csd_pass_rule. It works on its half of a tile, whose sections are counted here */
  const char *type; /* "AdamW"; the variants of a rule share it */
  uint32_t updated; /* number of sections that it updates */
  uint32_t most;    /* most sections that a tile may have */
  uint32_t codec;   /* csd_codec of its 8-bit states; CSD_FP32: it has none */
} csd_rule_row;

/* Returns all rows of rules.h; after the last one, `type` is NULL. */
const csd_rule_row *csd_rules(void);

/* Instruction sets of the CPU updater. All of them compute the same bits, except for the sign and the payload of a NaN in
 * fp32 states and in fp32 and fp16 parameters: where both operands are NaN, or the result is a new one, each takes its
 * own. (A NaN in a bf16 parameter is always 0x7fc0, and codes have none.) */
enum csd_isa { CSD_ISA_SCALAR = 0, CSD_ISA_AVX2 = 1, CSD_ISA_AVX512 = 2 };

/* Updates `n` elements of each section of `state` in place, on the calling thread. `param` receives the rounded master;
 * it may be NULL. For a csd_pass_rule, `state` has the sections of that pass, and `param` receives what it returns. */
int csd_update(const csd_hyper *hyper, int32_t isa, uint64_t n, const void *grad, int32_t grad_dtype,
               float *const *state, uint32_t sections, void *param, int32_t param_dtype, csd_error *error);

/* Like csd_update, on codes of the rule's csd_codec: `codes` has one address per section. `key`: random key of the first
 * element, for the stochastic rounding. A csd_pass_rule updates its half of the sections, of which all are given. */
int csd_update_codes(const csd_hyper *hyper, int32_t isa, uint64_t n, const void *grad, int32_t grad_dtype,
                     void *const *codes, uint32_t sections, void *param, int32_t param_dtype, uint32_t key,
                     csd_error *error);

/* Encode fp32 states (four addresses, or NULL), rounded to nearest, and decode them again; see csd_param.edited and
 * csd_engine_decode. `codec`: csd_codec, not CSD_FP32. */
int csd_encode(int32_t isa, uint64_t n, const float *const *states, uint32_t codec, int32_t param_dtype,
               void *const *codes, uint32_t sections, csd_error *error);
int csd_decode(int32_t isa, uint64_t n, void *const *codes, uint32_t codec, int32_t param_dtype, float *const *states,
               uint32_t sections, csd_error *error);

int32_t csd_isa_best(void);                     /* the best that this CPU supports */
int csd_isa_use(int32_t isa, csd_error *error); /* for all engines, from the next tile on */
int32_t csd_isa_used(void);

/* Number of update threads, shared by all engines of the process. Default: the number of CPUs it may run on. */
int csd_threads_use(uint32_t n, csd_error *error);
uint32_t csd_threads_used(void);

/* Steps of up to so many elements are updated by the thread that pushes instead, from the next step on, where the back
 * end allows it: waking another thread would take longer. 0: no steps are. The bits are the same. */
void csd_small_step_use(uint64_t elems);
uint64_t csd_small_step_used(void);

/* Returns how many of the `n` gradients of a piece Top-K sends: max(1, round(n * ratio)), ties to even, at most n; 0 if
 * n is 0. */
uint64_t csd_topk_count(double ratio, uint64_t n);

/* One parameter's elements in one tile, of which Top-K sends up to `k`. */
typedef struct csd_topk_part {
  const void *grad;    /* its first gradient */
  uint16_t *residual;  /* its first residual, bf16; NULL: no error feedback */
  uint64_t n;          /* number of elements, less than 2^32 */
  uint64_t k;          /* from 1 to `n` */
  uint64_t tile_first; /* index of its first element in the tile */
  uint32_t grad_dtype;
  uint32_t dtype; /* CSD_F16 or CSD_BF16: dtype of the gradients that are sent */
  float scale;    /* c[CSD_GRAD_SCALE] */
  uint32_t seed;  /* for the stochastic rounding of residuals, of the first element; the next ones have seed + 1, ... */
} csd_topk_part;

/* Selects the Top-K gradients of a tile of `elems` elements, on the calling thread, as csd_engine_push takes them.
 * `parts` are in the order of the tile. `words` has room for the `k` of all parts together and 16 words per block of the
 * tile (csd_kernel.h); sets `*n_words` to the number of words used. */
int csd_topk_entries(const csd_topk_part *parts, uint32_t n_parts, uint64_t elems, uint32_t *words, uint64_t *n_words,
                     csd_error *error);

/* Updates the residuals of these parts of a tile with what its entries do not send. The gradients must be the same as
 * when these entries were selected. */
int csd_topk_feed_back(const csd_topk_part *parts, uint32_t n_parts, const uint32_t *words, uint64_t n_words,
                       csd_error *error);

/* Returns the CRC-32C (Castagnoli) of `bytes` bytes, continuing from `crc` (0 to begin). */
uint32_t csd_crc32c(uint32_t crc, const void *data, uint64_t bytes);

/* end of cdef */

#ifdef __cplusplus
}
#endif
#endif
