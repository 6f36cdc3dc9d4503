// Explicit-state model of how csd_optim commits (docs/commits.md): two copies on each device, rounds of several ranks,
// steps and loads that are undone before or after their commit has begun, edits, manifests, residuals, parameters that
// leave, flushes that fail, kills, resumes, missing drives, publish(). Breadth first over all states within bounds, which are stored whole
// and not as hashes: nothing is left out. A violation prints the shortest sequence of actions that leads to it, with
// the ranks as without_names() numbers them.
//
//   g++ -O2 -std=c++20 -DRANKS=2 -DDEVICES=1 rounds.cpp -o rounds && ./rounds kills=2 flush=1 mutant=no_proof
//
// A version is what one agreed step, or load, makes of all states; each attempt gets its own. Slots, the residual's
// spaces, the manifest's spaces and copies contain versions, and no bytes. An action is atomic: one function that this
// file names as `module.py: Class.method`, or a part of it between two writes to a device or two messages.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <utility>
#include <vector>

using u8 = uint8_t;
constexpr int R = RANKS, D = DEVICES, MOST_VERSIONS = 7;

// ---- bounds and mutants ---------------------------------------------------------------------------------------------

#define BUDGETS(X) /* how often it may happen */                                                                   \
  X(kills, 1)      /* restarts of all; in each of them any rank may be killed at any action, also of the resume */ \
  X(flush, 0)      /* a flush fails */                                                                             \
  X(stepfail, 1)   /* a step fails on one rank */                                                                  \
  X(sync, 0)       /* synchronize() */                                                                             \
  X(load, 0)       /* loading() */                                                                                 \
  X(loadfail, 0)   /* the body of loading() raises on one rank */                                                  \
  X(edit, 0)       /* save() after states were edited */                                                           \
  X(manifest, 0)   /* parameters join */                                                                           \
  X(leave, 0)      /* a parameter leaves: one whose tiles no step of the model updates */                          \
  X(sharefail, 0)  /* a share of a version cannot be written */                                                    \
  X(missing, 0)    /* a drive, or a rank's directory, is missing as all are started again */

#define BOUNDS(X)                                                                          \
  BUDGETS(X)                                                                               \
  X(versions, 4)    /* that come to be: steps, also undone ones, and loads */              \
  X(overlap, 1)     /* of several ranks: steps end behind the program, and are voted on */ \
  X(guess, 0)       /* steps begin in backward */                                          \
  X(residual, 0)    /* commits have residuals */                                           \
  X(publish, 0)     /* publish() was called */                                             \
  X(first, 0)       /* begin without a store */                                            \
  X(close, 1)       /* a rank may be closed between two calls */                           \
  X(most, 24000000) /* states */

#define MUTANTS(X)                                                                                               \
  X(none)                                                                                                        \
  X(agree_without_round)        /* a step begins although a rank could not commit its round */                   \
  X(copy_1_before_confirmation) /* of a round, without waiting for the other ranks */                            \
  X(copy_1_before_devices)      /* without waiting for copy 0 of other devices */                                \
  X(no_flush)                   /* copy 0 is written without a flush of the tiles */                             \
  X(no_discard_newer)           /* a resume leaves copies of other commits */                                    \
  X(discards_own_copy_first)    /* a resume writes the copy that it has adopted before the other one */          \
  X(no_proof)                   /* after a flush that failed, tiles are not read back */                         \
  X(withdraw_keeps_number)      /* a withdrawn round's number stays that of the rank */                          \
  X(withdraw_keeps_record)      /* the record of a withdrawn commit stays */                                     \
  X(withdraw_keeps_manifest)    /* a withdrawn commit's manifest counts as written: fault F1 */                  \
  X(withdraw_keeps_work)        /* work of a withdrawn commit that has failed is done later */                   \
  X(number_reused)              /* a withdrawn round's number is used again */                                   \
  X(highest_not_exchanged)      /* each rank takes its own highest number plus one */                            \
  X(newest_of_each_rank)        /* a resume takes each rank's newest round */                                    \
  X(older_of_one_round)         /* a resume takes the older of a rank's two commits of one round */              \
  X(step_before_copy_0)         /* a step begins although copy 0 of the last commit is not on all devices */     \
  X(guess_before_confirmation)  /* a step begins in backward before all ranks have the last round */             \
  X(copy_0_again)               /* a commit whose copy 1 failed begins with copy 0 again */                      \
  X(load_leaves_tiles)          /* loading() that raises leaves tiles where they are: fault F2 */                \
  X(step_over_withdrawn_load)   /* a step overwrites a withdrawn load without committing the states before it */ \
  X(load_over_withdrawn_load)   /* so does the next loading() */                                                 \
  X(edit_over_withdrawn_load)   /* so does save() after edits */                                                 \
  X(leaves_before_commit)       /* a parameter leaves before the last commit has read its tiles */               \
  X(left_keeps_name)            /* commits name a parameter that has left */                                     \
  X(gives_back_at_once)         /* the space of a parameter is given out as it leaves */                         \
  X(gives_back_at_copy_0)       /* when this rank has copy 0 of the next commit */                               \
  X(missing_is_no_commit)       /* a missing file counts as a file without a commit: fault F3 */                 \
  X(copy_1_is_no_evidence)      /* a resume begins anew although some device has copy 1 */                       \
  X(name_at_copy_0)             /* a version gets its name when this rank has copy 0 */                          \
  X(failed_share_not_told)      /* the other ranks do not learn that a share is missing */

#define DEFINE(name, value) int name = value;
static struct {
  BOUNDS(DEFINE)
} bounds;
#undef DEFINE
#define DEFINE(name) name,
static enum { MUTANTS(DEFINE) } mutant;
#undef DEFINE

// ---- states ---------------------------------------------------------------------------------------------------------
// All members are bytes, all zero at first, so that states are compared and hashed as memory.

enum { GARBAGE = 255 };  // else contents are 2 * version, plus 1 if edited; 0: nothing
enum { SPACE = 2 };      // areas 0 and 1 of a device are a tile's slots, 2 and 3 the residual's spaces

struct Copy {  // a superblock, with its table. Sequence 0: none, or torn, and then its contents are GARBAGE
  u8 sequence, round, contents, slot, space, record;
  u8 manifest, right_manifest;  // the one that it names, and the one that it should name
  u8 left;                      // it does not name the parameter that leaves; GARBAGE: it names tiles without contents
};
enum Writes { NOT_BEGUN, COPY_0, COPY_1, WRITTEN, FAILED };  // what is done to a copy
struct Device {
  u8 has_file, disk[4], manifests[2], is_given_out;  // the space of the parameter that leaves
  Copy copies[2];
  // What a process knows: areas as it sees them, and a bit for each that it has written and not flushed.
  u8 seen[4], unflushed, writes, in_doubt, is_new;  // is_new: it has made the file
  u8 manifest, job_manifest;                        // of the newest commit, and of the one under way
  u8 adopted, discarded;                            // by a resume: which copy, and how many were written since
};
struct Notes {  // what a commit notes when it begins, and withdraw() puts back
  u8 record, has_manifest, round, step;
};
enum Work { NO_WORK, PREPARE, ALONE, COMPLETE };  // copy 0 of a round, both copies, copy 1 of a round
enum Progress { IDLE, RUNS, FAILS };
struct Commit {
  Copy copy;
  u8 with_manifest, frees, is_staged, is_prepared, work, progress, is_inline;  // inline: a failure is raised
};
struct Publisher {
  u8 number, due, unnamed, has_share, has_failed, naming;
};
enum Verdict { NO_VOTE, VOTING, VOTED, KEPT, MUST_MEET, VOTE_LOST };
enum Call { NO_CALL, STEP, STEP_JOINED, STEP_LEFT, SYNC, LOAD, SAVE };
enum Leaving {
  STAYS,
  LEAVES,
  FREED,
  GIVEN_BACK
};  // the program has dropped it; no commit names it from now on; its space
// clang-format off
enum Place {  // of a rank's program
  DEAD, CLOSED, OPENS, DISCARDS, RESUMED, BETWEEN, MEETS, OWN_ROUND, BEGINS, ENDS, TELLS_END, COMMITS, LOADS, LOADED,
  FLUSHES, FLUSHED, OWN_LOAD, WAITS, SAVES, SAVED, CLOSES, COMMITS_LAST, LOST
};
// clang-format on
enum Meeting { PROGRAM, VOTE };                     // two may be under way
enum { RAISES = 1, DIFFER = 2, WATCH_FAILED = 4 };  // results
enum { LACKS = 255, NO_ROUND = 254 };               // instead of a round
struct Rank {
  Device devices[D];
  u8 share_number, share;  // of a version, in the folder
  // What follows is in memory.
  u8 place, call, n_calls, raised;     // `n_calls`: modulo 2; raised: a part of this call has
  u8 contents, before, slot, version;  // now; before the last step or load; the slot now; the step's or load's version
  u8 uncommitted, due_record, is_forced, unconfirmed, sequence, highest;  // number of a round that was used
  Notes notes, noted;                                                     // now, and before the last commit
  Commit commit;
  u8 leaving;                        // what has become of the parameter that leaves
  u8 space, description, is_lost;    // committed space of the residual; the description that manifests should have
  u8 posted[2], told[2], took[2];    // in meetings
  u8 vote, is_complete, has_landed;  // of the last step
  Publisher publisher;
};
struct State {
  Rank ranks[R];
#define DEFINE(name, _) u8 name;
  struct {
    BUDGETS(DEFINE)
  } left;
#undef DEFINE
  u8 over[2], result[2], highest;  // of meetings
  u8 n_versions, parents[MOST_VERSIONS + 1], steps[MOST_VERSIONS + 1];
  u8 reported, edits[R];  // version that was reported as durable; contents with edits that were
  u8 published, published_number, undone, doubtful;  // a bit per version; doubtful: withdrawn loads, until overwritten
};

struct Next {
  State state;
  std::string action;
};
static std::vector<Next> *nexts;
static bool is_tracing;
static std::string violation;

static bool is_there(const Rank &own) { return own.place != DEAD && own.place != CLOSED; }
static bool none_there(const State &s) { return std::none_of(s.ranks, s.ranks + R, is_there); }
static bool is_leaving(const Rank &own) { return !is_there(own) || own.place >= CLOSES; }
static bool any_gone(const State &s) {
  return std::any_of(s.ranks, s.ranks + R, [](const Rank &k) { return !is_there(k) || k.place == LOST; });
}
static u8 version_of(u8 contents) { return contents == GARBAGE ? 0 : contents >> 1; }
static u8 step_of(const State &s, u8 contents) { return s.steps[version_of(contents)]; }
static bool continues(const State &s, u8 from, u8 version) {  // `from` is this version, or one of those before it
  while (version > from) version = s.parents[version];
  return version == from;
}
static bool next_is_round(const State &s, const Rank &own) {  // rounds.py: Rounds.next_is_one
  return R > 1 && (own.is_forced || step_of(s, own.contents) != own.notes.step);
}

// Note that rank `r` may do an action that leads to `t`.
static void add(State t, int r, const char *action) {
  bool rest = true;
  for (Rank &k : t.ranks) rest &= !is_there(k) || (k.place == BETWEEN && k.n_calls);
  for (Rank &k : t.ranks) k.n_calls *= !rest;
  for (int m : {PROGRAM, VOTE}) {  // a meeting whose result nobody awaits any more
    bool over = t.over[m];
    for (Rank &k : t.ranks) over &= k.took[m] || is_leaving(k) || (m == VOTE && k.vote == VOTE_LOST);
    if (!over && !none_there(t)) continue;
    t.over[m] = t.result[m] = t.highest = 0;
    for (Rank &k : t.ranks) k.posted[m] = k.told[m] = k.took[m] = 0;
  }
  nexts->push_back({t, is_tracing ? (r < 0 ? "" : "rank " + std::to_string(r) + ": ") + action : ""});
}

// ---- what a resume finds --------------------------------------------------------------------------------------------

struct Chosen {  // a commit that all devices of a rank have, and which copy of each
  bool is_there;
  Copy copies[D];
  u8 at[D];
};

static bool is_whole(const Device &d, int c) { return d.copies[c].sequence && d.manifests[c] == d.copies[c].manifest; }

// file.py: StoreFile._was_never_committed; also true without a file
static bool is_empty(const Device &d) { return !d.copies[1].sequence && !d.copies[1].contents && !is_whole(d, 0); }

// recovery.py: common_commits: the newest commit of this round
static Chosen choose(const Rank &own, u8 round) {
  Chosen chosen{};
  for (int sequence = 255; sequence; sequence--) {
    Chosen found{.is_there = true};
    for (int i = 0; i < D; i++) {
      int at = -1;
      for (int c : {1, 0})
        if (is_whole(own.devices[i], c) && own.devices[i].copies[c].sequence == sequence) at = c;
      if (!(found.is_there &= at >= 0)) break;
      found.copies[i] = own.devices[i].copies[at], found.at[i] = at;
    }
    const bool is_right = found.copies[0].round == round || mutant == newest_of_each_rank;
    if (found.is_there && is_right && (!chosen.is_there || mutant == older_of_one_round)) chosen = found;
  }
  return chosen;
}

enum Outcome { ANEW, REFUSED, FOUND };  // FOUND + the round

// recovery.py: last_round, common_commits: whether there is something to continue from
static int recover(const State &s) {
  int n_empty = 0, n_missing = 0, last = ANEW;
  bool is_first = true;  // no commit is known to have been complete
  for (const Rank &k : s.ranks)
    for (const Device &d : k.devices) {
      n_empty += is_empty(d), n_missing += !d.has_file && mutant != missing_is_no_commit;
      if (!is_empty(d) && !is_whole(d, 0) && !is_whole(d, 1)) violation = "I6: no copy of a device is whole";
      for (int c : {0, 1})
        if (is_whole(d, c)) is_first &= d.copies[c].sequence == 1 && (!c || mutant == copy_1_is_no_evidence);
    }
  if (n_empty) return n_empty == R * D || (is_first && !n_missing) ? ANEW : REFUSED;
  for (const Copy &c : s.ranks[0].devices[0].copies) {
    bool by_all = std::all_of(s.ranks, s.ranks + R, [&](const Rank &k) { return choose(k, c.round).is_there; });
    if (by_all) last = std::max(last, FOUND + c.round);
  }
  if (last < FOUND && violation.empty()) violation = "I1: nothing that all devices of all ranks have";
  return last;
}

// All processes are gone: check what a resume would find.
static void check_resume(const State &s) {
  const int found = recover(s);
  auto check = [](bool is_right, const char *otherwise) {
    if (!is_right && violation.empty()) violation = otherwise;
  };
  check(found != REFUSED, "I1: a device has no commit, others have, and nothing was ever missing");
  check(found != ANEW || !(s.reported || s.published), "I2: begins anew after a version was reported");
  if (found < FOUND || !violation.empty()) return;
  const u8 version = version_of(choose(s.ranks[0], found - FOUND).copies[0].contents);
  for (int r = 0; r < R; r++) {
    const Chosen chosen = choose(s.ranks[r], found - FOUND);
    const u8 contents = chosen.copies[0].contents, edits = s.edits[r];
    for (int i = 0; i < D; i++) {
      const Copy &c = chosen.copies[i];
      const u8 *disk = s.ranks[r].devices[i].disk;
      check(c.contents != GARBAGE, "I1: states that were written in part are found");
      check(version_of(c.contents) == version, "I1: a mix of two versions is found");
      check(c.contents == contents, "I1: devices of a rank have different commits of one sequence");
      check(disk[c.slot] == c.contents, "I4: a slot of the commit that is found has other contents");
      check(!bounds.residual || disk[SPACE + c.space] == version, "I4: a residual that is found is overwritten");
      check(c.record == version, "I1: the record that is found is that of another version");
      check(c.manifest == c.right_manifest, "I1: the manifest that is found is not that of its commit");
      check(c.left != GARBAGE, "I4: the tiles of a parameter that is found had left before they were read");
      check(c.left || !s.ranks[r].devices[i].is_given_out, "I9: the space of a parameter that is found was given out");
    }
    const bool has_edits = edits && version_of(edits) == version && s.reported == version;
    check(!has_edits || contents == edits, "I2: an edit that was reported as durable is lost");
  }
  check(continues(s, s.reported, version), "I2: a version that was reported as durable is lost");
  check(continues(s, s.published, version), "I3: a published version is ahead of what is found, or differs from it");
  check(!(s.undone >> version & 1), "I7: a version that was undone is found");
}

// ---- a crash --------------------------------------------------------------------------------------------------------

static void write(Device &d, int area, u8 contents) { d.seen[area] = contents, d.unflushed |= 1 << area; }
static void flush_areas(Device &d) {
  for (int area = 0; area < 4; area++)
    if (d.unflushed >> area & 1) d.disk[area] = d.seen[area];
  d.unflushed = 0;
}
static void put_copy(const Commit &job, Device &d, int c) {
  d.copies[c] = job.copy, d.copies[c].manifest = d.job_manifest;
  if (job.with_manifest) d.manifests[c] = d.job_manifest;
}
static void tear_copy(const Commit &job, Device &d, int c) {
  d.copies[c] = {.contents = GARBAGE};
  if (job.with_manifest) d.manifests[c] = 0;
}

// Return what a rank's devices may be after its process is killed: whatever was not flushed is old, new or torn.
static std::vector<Rank> after_crash(const Rank &own) {
  std::vector<Rank> found = {Rank{}};
  memcpy(found[0].devices, own.devices, sizeof own.devices);
  found[0].share_number = own.share_number, found[0].share = own.share;
  auto vary = [&](int i, auto... changes) {
    std::vector<Rank> varied;
    for (Rank &k : found) (varied.push_back(k), ..., (varied.push_back(k), changes(varied.back().devices[i])));
    found = std::move(varied);
  };
  for (int i = 0; i < D; i++) {
    const Device &d = own.devices[i];
    for (int area = 0; area < 4; area++)
      if (d.unflushed >> area & 1) {
        auto torn = [=](Device &x) { x.disk[area] = GARBAGE; };
        if (d.seen[area] == GARBAGE) vary(i, torn);
        else vary(i, torn, [=](Device &x) { x.disk[area] = x.seen[area]; });
      }
    const Commit &job = own.commit;
    if (d.writes == COPY_0 || d.writes == COPY_1)
      vary(
          i, [&](Device &x) { tear_copy(job, x, x.writes - COPY_0); },
          [&](Device &x) { put_copy(job, x, x.writes - COPY_0); });
  }
  for (Rank &k : found)
    for (Device &d : k.devices) {
      memset(d.seen, 0, sizeof d - offsetof(Device, seen));
      memcpy(d.seen, d.disk, sizeof d.disk);
    }
  return found;
}

static void end_process(const State &s, int r, Place place, const char *action) {
  for (const Rank &k : after_crash(s.ranks[r])) {
    State t = s;
    t.ranks[r] = k, t.ranks[r].place = place;
    add(t, r, action);
  }
}

// ---- the publisher --------------------------------------------------------------------------------------------------

// publisher.py: Publisher.give_up
static void version_given_up(Publisher &p) { p.due = p.has_share = p.has_failed = 0; }

// publisher.py: Publisher.after_commit
static void version_committed(Rank &own, bool is_first_rank, u8 version) {
  Publisher &p = own.publisher;
  if (p.unnamed != version || !version) return;
  if (is_first_rank) p.naming = p.has_share ? 1 : 2;  // 2: discards it
  p.unnamed = p.has_share = 0, p.number++;
}

// publisher.py: Publisher.step_taken_back
static void version_undone(Rank &own) {
  Publisher &p = own.publisher;
  p.due = p.unnamed = p.has_share = 0;
  if (mutant != failed_share_not_told && own.share_number == p.number) own.share_number = own.share = 0;
}

// publisher.py: Publisher.before_commit: writes its share, unless that has been done. Returns whether there is one.
static bool writes_share(const State &s, int r) {
  State t = s;
  Rank &own = t.ranks[r];
  Publisher &p = own.publisher;
  const u8 version = version_of(own.commit.copy.contents);
  if (!p.due || p.due != version || p.has_failed) return false;
  if (s.left.sharefail) {
    const bool tells = mutant != failed_share_not_told;
    t.left.sharefail--, p.due = 0, p.has_share = !tells, p.has_failed = tells;
    if (own.share_number == p.number && tells) own.share_number = own.share = 0;
    add(t, r, "its share of the version cannot be written");
  }
  t = s, p.due = 0, p.has_share = 1, own.share_number = p.number, own.share = version;
  if (R == 1) p.unnamed = version;
  add(t, r, "writes its share of the version");
  return true;
}

// publisher.py: Publisher._name; folder.py: Folder.name: rank 0 names a version, behind the program
static void names_version(const State &s) {
  State t = s;
  Publisher &p = t.ranks[0].publisher;
  const u8 number = mutant == name_at_copy_0 ? p.number : p.number - 1, share = s.ranks[0].share;
  bool is_whole = p.naming == 1;
  for (const Rank &k : s.ranks) is_whole &= k.share_number == number && s.steps[k.share] == s.steps[share];
  if (mutant == name_at_copy_0) is_whole = s.ranks[0].share_number == number;
  p.has_failed |= p.naming == 1 && !is_whole;
  if (is_whole) t.published = share, t.published_number = number;
  for (Rank &k : t.ranks) {
    if (is_whole && k.share != share && mutant != name_at_copy_0)
      violation = "I3: a version has shares of different steps";
    if (k.share_number <= number && (is_whole || p.naming == 2 || p.has_failed)) k.share_number = k.share = 0;
  }
  p.naming = 0;
  add(t, 0, is_whole ? "names the version" : "discards what has no name");
}

// chain.py: a resumed publisher names the version that was found, if all have a share of it, and else begins a new one
static void continues_chain(State &t) {
  const Rank &first = t.ranks[0];
  const u8 version = version_of(first.contents);
  bool is_whole = first.share && first.share == version && first.share_number > t.published_number;
  for (const Rank &k : t.ranks) is_whole &= k.share_number == first.share_number && k.share == first.share;
  if (is_whole) t.published = version, t.published_number = first.share_number;
  for (Rank &k : t.ranks) k.share_number = k.share = 0;
  if (version && t.published != version) t.published = version, t.published_number++;
}

// ---- the committer --------------------------------------------------------------------------------------------------

static void start(Rank &own, Work work, bool is_inline) {  // commit.py: Background.start, run
  own.commit.work = work, own.commit.progress = RUNS, own.commit.is_inline = is_inline;
  for (Device &d : own.devices) d.writes = NOT_BEGUN;
}
static void drop_work(Rank &own) { own.commit.work = own.commit.progress = own.commit.is_inline = 0; }

// durable.py: DurableCommitter.commit; rounds.py: Rounds.begin
static void commit(const State &s, Rank &own, bool is_inline) {
  const bool is_round = next_is_round(s, own);
  own.noted = own.notes;
  if (own.due_record) own.notes.record = own.due_record;
  if (is_round) own.notes.round = ++own.highest, own.unconfirmed = 1;
  own.notes.has_manifest = 1, own.notes.step = step_of(s, own.contents);
  own.commit = {.with_manifest = !own.noted.has_manifest};
  Copy &c = own.commit.copy;
  c.sequence = ++own.sequence, c.round = own.notes.round, c.contents = own.contents, c.slot = own.slot;
  c.space = own.space, c.record = own.notes.record, c.right_manifest = own.description;
  c.left = own.leaving >= FREED && mutant != left_keeps_name, own.commit.frees = own.leaving == FREED;
  own.due_record = own.is_forced = own.uncommitted = 0;
  start(own, is_round ? PREPARE : ALONE, is_inline);
}

// commits.py: Commits._mark_recoverable
static void mark_recoverable(State &t, int r) {
  Rank &own = t.ranks[r];
  const Copy &copy = own.commit.copy;
  const u8 version = version_of(copy.contents);
  if (continues(t, t.reported, version)) t.reported = version;
  if (copy.contents != GARBAGE && copy.contents & 1) t.edits[r] = copy.contents;
  if (bounds.residual) own.space = copy.space;
  if (bounds.publish && R > 1) version_committed(own, r == 0, version);
  if (Publisher &p = own.publisher; bounds.publish && R == 1 && p.unnamed && p.unnamed == version) {
    if (p.has_share) t.published = version, t.published_number = p.number;
    p.number++, p.unnamed = p.has_share = 0;
  }
}

// committer.py: Committer.count; commits.py: Commits.note_confirmed
static void count_ballots(State &t, int r, bool has_failed) {
  Rank &own = t.ranks[r];
  if (has_failed) version_given_up(own.publisher);
  if (!own.unconfirmed) return;
  own.unconfirmed = 0;
  mark_recoverable(t, r);
  if (mutant == copy_1_before_confirmation) drop_work(own);  // it is written already
  else start(own, COMPLETE, false);
}

// durable.py: DurableCommitter.before_undo, after_undo; rounds.py: Rounds.withdraw: the last commit does not count
static void withdraw(Rank &own) {
  const Notes begun = own.notes;
  if (mutant != withdraw_keeps_work) drop_work(own);
  own.unconfirmed = 0, own.notes = own.noted;
  if (mutant == withdraw_keeps_number) own.notes.round = begun.round;
  if (mutant == withdraw_keeps_record) own.notes.record = begun.record;
  if (mutant == withdraw_keeps_manifest) own.notes.has_manifest = 1;
  if (mutant == number_reused) own.highest = own.notes.round;
}

// engine.py: Engine.undo_last, where the step has landed
static void undo_step(State &t, Rank &own) {
  if (own.has_landed) {
    if (own.unconfirmed) withdraw(own);
    own.contents = own.before, own.slot ^= 1, own.uncommitted = own.due_record = 0;
  }
  own.has_landed = 0, t.undone |= 1 << own.version;
  if (bounds.publish) version_undone(own);
}

// durable.py: DurableCommitter.loading, when it raises. `has_begun`: the load's commit has, and may be on the disk.
static void undo_load(State &t, Rank &own, bool has_begun) {
  (has_begun ? t.doubtful : t.undone) |= 1 << own.version;
  own.due_record = 0;
  if (mutant == load_leaves_tiles) {
    if (has_begun) return;
    own.contents = GARBAGE;  // those that have loaded less have a mix
    for (Device &d : own.devices) write(d, own.slot, GARBAGE);
  } else if (version_of(own.contents) == own.version) {
    if (has_begun) withdraw(own);
    own.contents = own.before, own.slot ^= 1, own.is_forced = 0, own.uncommitted = has_begun;
  }
}

// A step or a load begins to write to the slots that the last commit does not name.
static void overwrite(State &t, int r, u8 contents) {
  for (Device &d : t.ranks[r].devices) write(d, 1 - t.ranks[r].slot, contents);
  t.undone |= t.doubtful;
}

// open_devices.py: OpenDevices.give_back
static void give_back(Rank &own) {
  for (Device &d : own.devices) d.is_given_out = 1;
  own.leaving = GIVEN_BACK;
}

// commit.py: Background._run: the next part of a commit, in the background or within a call
static void fail_work(State &t, int r, const char *action) {
  t.ranks[r].commit.progress = FAILS;
  add(t, r, action);
}
static bool stages(State t,
                   int r) {  // durable.py: DurableCommitter._prepare; commit.py: Commit.prepare, CommitJob.stage
  Rank &own = t.ranks[r];
  if (own.commit.is_staged) return false;
  if (own.publisher.naming || writes_share(t, r)) return true;  // publisher.py: Publisher._end_naming
  if (own.is_lost) return fail_work(t, r, "the commit fails: data are lost"), true;
  own.commit.is_staged = 1;
  if (bounds.residual) own.commit.copy.space = 1 - own.space;
  for (Device &d : own.devices) {
    if (bounds.residual) write(d, SPACE + own.commit.copy.space, version_of(own.commit.copy.contents));
    d.job_manifest = own.commit.with_manifest ? own.commit.copy.right_manifest : d.manifest;
  }
  add(t, r, "stages the commit");
  return true;
}
static bool proves(State t, int r) {  // proof.py: prove: what the commit names is on the disk, or is lost
  Rank &own = t.ranks[r];
  bool in_doubt = false, is_lost = false;
  for (Device &d : own.devices) {
    if (d.writes != NOT_BEGUN) return false;
    if (!d.in_doubt || mutant == no_proof) continue;
    const Copy &copy = own.commit.copy;
    in_doubt = true, d.in_doubt = 0;
    flush_areas(d);
    is_lost |= d.disk[copy.slot] != copy.contents ||
               (bounds.residual && d.disk[SPACE + copy.space] != d.seen[SPACE + copy.space]);
  }
  own.is_lost |= is_lost;
  if (is_lost) fail_work(t, r, "reads back what a flush has lost");
  else if (in_doubt) add(t, r, "reads back that nothing is lost");
  return in_doubt;
}
static void publishes(const State &s, int r, int i, int copy) {  // file.py: StoreFile.publish, sync
  const Commit &job = s.ranks[r].commit;
  State t = s;
  Device &d = t.ranks[r].devices[i];
  auto fails = [&](const char *action, auto change) {
    State u = s;
    Device &e = u.ranks[r].devices[i];
    u.left.flush--, e.writes = FAILED;
    change(e);
    add(u, r, action);
  };
  if (d.writes == NOT_BEGUN) {
    if (copy == 0 && mutant != no_flush) {
      for (int lost = d.unflushed; s.left.flush && lost; lost = (lost - 1) & d.unflushed)
        fails("a flush fails, and loses data, on a device",
              [&](Device &e) { e.unflushed &= ~lost, flush_areas(e), e.in_doubt = 1; });
      if (s.left.flush && d.unflushed)
        fails("a flush fails, and loses nothing, on a device", [](Device &e) { flush_areas(e), e.in_doubt = 1; });
      flush_areas(d);
    }
    d.writes = copy ? COPY_1 : COPY_0;
    add(t, r, copy ? "writes copy 1 to a device" : "has flushed, and writes copy 0 to a device");
  } else if (d.writes == COPY_0 + copy) {
    if (std::max(d.copies[0].sequence, d.copies[1].sequence) > job.copy.sequence)
      violation = "I8: an old commit is published over a newer one";
    put_copy(job, d, copy);
    d.manifest = d.job_manifest, d.writes = WRITTEN;
    add(t, r, copy ? "copy 1 is durable on a device" : "copy 0 is durable on a device");
    if (!s.left.flush) return;
    fails("the flush of a copy fails, old it is, on a device", [](Device &) {});
    fails("the flush of a copy fails, torn it is, on a device", [&](Device &e) { tear_copy(job, e, copy); });
    fails("the flush of a copy fails, new it is, on a device", [&](Device &e) { put_copy(job, e, copy); });
  } else if (mutant == copy_1_before_devices && !copy && d.writes == WRITTEN && job.work == ALONE) {
    tear_copy(job, d, 1);
    if (d.copies[1].sequence != s.ranks[r].devices[i].copies[1].sequence)
      add(t, r, "writes copy 1 at once, torn it is");
  }
}
static void background(const State &s, int r) {
  const Commit &job = s.ranks[r].commit;
  const bool is_first = job.work != COMPLETE && !job.is_prepared;
  if (job.progress != RUNS || (is_first && (stages(s, r) || proves(s, r)))) return;
  bool is_written = true, has_ended = true;
  for (int i = 0; i < D; i++) {
    const u8 writes = s.ranks[r].devices[i].writes;
    is_written &= writes == WRITTEN, has_ended &= writes == WRITTEN || writes == FAILED;
    publishes(s, r, i, !is_first);
  }
  if (!has_ended) return;
  State t = s;
  Rank &own = t.ranks[r];
  for (Device &d : own.devices) d.writes = NOT_BEGUN;
  if (!is_written) {
    if (mutant == copy_0_again) own.commit.is_prepared = 0;
    return fail_work(t, r, "the commit fails");
  }
  own.commit.is_prepared = 1;
  if (mutant == name_at_copy_0 && job.work == PREPARE && bounds.publish && r == 0) own.publisher.naming = 1;
  if (job.work == ALONE && !is_first) mark_recoverable(t, r);
  if (job.frees && (!is_first || mutant == gives_back_at_copy_0)) give_back(own);  // commits.py: Commits._complete
  const bool goes_on = is_first && (job.work == ALONE || mutant == copy_1_before_confirmation);
  if (!goes_on) drop_work(own);
  add(t, r, is_first ? "copy 0 is on all devices" : "copy 1 is on all devices");
}

// commit.py: Background.wait. What failed in the background is tried again, once, and a failure of that is raised.
enum Waited { DONE, NOT_YET, RAISED };
static Waited wait(const State &s, int r) {
  const Commit &job = s.ranks[r].commit;
  if (!job.work) return DONE;
  if (job.progress == RUNS) return NOT_YET;
  if (job.is_inline || s.ranks[r].is_lost) return RAISED;
  State t = s;
  start(t.ranks[r], (Work)job.work, true);
  add(t, r, "tries again to commit");
  return NOT_YET;
}
static Waited wait_for_copy_0(const State &s, int r) {  // durable.py: DurableCommitter.before_step, own_round
  const Commit &job = s.ranks[r].commit;
  const bool has_copy_0 = job.work == COMPLETE || job.is_prepared || mutant == step_before_copy_0;
  return job.progress == RUNS && !job.is_inline && has_copy_0 ? DONE : wait(s, r);
}

// ---- meetings -------------------------------------------------------------------------------------------------------

static bool may_take(const State &s, int r, Meeting m) {
  if (s.over[m]) return s.ranks[r].posted[m] && !s.ranks[r].took[m];
  return std::all_of(s.ranks, s.ranks + R, [&](const Rank &k) { return k.posted[m]; });
}
static u8 any_raises(State &t) {  // ranks.py: all_ranks_or_none
  return std::any_of(t.ranks, t.ranks + R, [](const Rank &k) { return k.told[PROGRAM]; });
}

// Meet the other ranks: tell something, then act on the result, which the first rank that has it derives from what all
// have told. `act` returns what it has done.
template <class Result, class Act>
static void meet(const State &s, int r, u8 told, Result result, Act act) {
  State t = s;
  Rank &own = t.ranks[r];
  if (!own.posted[PROGRAM]) {
    own.posted[PROGRAM] = 1, own.told[PROGRAM] = told;
    if (!s.over[PROGRAM]) add(t, r, "meets the others");
  } else if (may_take(s, r, PROGRAM)) {
    if (!s.over[PROGRAM]) t.result[PROGRAM] = result(t), t.over[PROGRAM] = 1;
    own.took[PROGRAM] = 1;
    const char *action = act(t, own, t.result[PROGRAM]);
    add(t, r, action);
  }
  t = s;
  if (own.place == LOADED || own.place == FLUSHED) undo_load(t, own, own.place == FLUSHED && !own.raised);
  own.place = LOST;
  if (any_gone(s)) add(t, r, "has lost others");
}
static void end_call(Rank &own) { own.place = BETWEEN, own.call = own.raised = own.commit.is_inline = 0; }

// Tell the round, or that it is lacking: agreement.py: agree_on_step; durable.py: DurableCommitter.confirm
static u8 compare_rounds(State &t) {
  u8 result = 0, round = LACKS;
  for (const Rank &k : t.ranks) {
    const u8 told = k.told[PROGRAM];
    if (told == LACKS) result |= mutant == agree_without_round ? 0 : RAISES;
    else if (round != LACKS && round != told) result |= DIFFER, violation = "I1: ranks meet in different rounds";
    else round = told;
    if (k.publisher.has_failed) result |= WATCH_FAILED;
    t.highest = std::max(t.highest, k.highest);
  }
  return result;
}
static void new_version(State &t, bool is_step) {
  u8 parent = 0;
  for (const Rank &k : t.ranks) parent = std::max(parent, version_of(k.contents));
  t.parents[++t.n_versions] = parent, t.steps[t.n_versions] = t.steps[parent] + is_step;
}

// ---- the program ----------------------------------------------------------------------------------------------------

static bool is_overlapped(const Rank &own) { return bounds.overlap && R > 1 && own.contents && !bounds.residual; }

static void votes(const State &s, int r) {  // together.py: Vote._vote
  State t = s;
  Rank &own = t.ranks[r];
  if (own.vote == VOTING && !s.over[VOTE] && !(own.is_complete && own.commit.progress == RUNS)) {
    const bool has_round = own.is_complete && !own.commit.work && own.unconfirmed && !next_is_round(s, own);
    own.vote = VOTED, own.posted[VOTE] = 1, own.told[VOTE] = has_round ? own.notes.round : 0;
    add(t, r, !own.is_complete ? "votes: failed" : has_round ? "votes: complete, committed" : "votes: complete");
  }
  if (s.ranks[r].vote != VOTED) return;
  if (may_take(s, r, VOTE)) {
    u8 &result = t.result[VOTE];
    for (const Rank &k : s.ranks) {
      if (s.over[VOTE]) break;
      result |= (k.is_complete ? 0 : RAISES) | (k.publisher.has_failed ? WATCH_FAILED : 0);
      result |= k.told[VOTE] && k.told[VOTE] == s.ranks[0].told[VOTE] ? 0 : DIFFER;
    }
    t.over[VOTE] = own.took[VOTE] = 1, own.vote = result & RAISES ? u8(MUST_MEET) : u8(KEPT);
    if (own.vote == KEPT) own.has_landed = 0;
    if (!(result & (RAISES | DIFFER))) count_ballots(t, r, result & WATCH_FAILED);
    add(t, r, result & RAISES ? "verdict: must meet" : result & DIFFER ? "verdict: kept" : "verdict: kept, confirmed");
  }
  t = s, own.vote = VOTE_LOST;
  if (any_gone(s)) add(t, r, "has lost others in the vote");
}

static u8 find_round(State &t) {
  const int found = recover(t);
  return found < FOUND ? NO_ROUND : found - FOUND;  // never REFUSED: see start_again()
}
static void opens(const State &s, int r) {  // file.py: StoreFile.open; resume.py: recover
  meet(s, r, 0, find_round, [&](State &, Rank &own, u8 round) {
    own.description = 1, own.place = RESUMED;
    if (round == NO_ROUND) return "finds nothing, and begins anew";
    const Chosen chosen = choose(own, round);
    const Copy &c = chosen.copies[0];  // durable.py: DurableCommitter.adopt_commit
    own.contents = c.contents, own.slot = c.slot, own.sequence = c.sequence, own.highest = c.round;
    own.notes = {.record = c.record, .has_manifest = 1, .round = c.round, .step = step_of(s, c.contents)};
    own.description = c.right_manifest, own.space = c.space, own.leaving = c.left ? FREED : STAYS;
    own.commit = {.copy = c, .with_manifest = 1};
    for (int i = 0; i < D; i++) {
      Device &d = own.devices[i];
      d.job_manifest = d.manifest = chosen.copies[i].manifest, d.adopted = chosen.at[i];
    }
    if (mutant != no_discard_newer) own.place = DISCARDS;
    return "chooses the last round that all have";
  });
}
static void discards(const State &s, int r) {  // file.py: StoreFile.discard_newer
  for (int i = 0; i < D; i++) {
    State t = s;
    Rank &own = t.ranks[r];
    Device &d = own.devices[i];
    const u8 copy = d.adopted ^ (d.discarded == (mutant == discards_own_copy_first));  // the other one, then this one
    if (d.discarded == 2) continue;
    if (d.writes == NOT_BEGUN) {
      d.writes = COPY_0 + copy;
      add(t, r, "begins to discard what is newer");
      continue;
    }
    put_copy(own.commit, d, copy);
    d.writes = NOT_BEGUN, d.discarded++;
    if (std::all_of(own.devices, own.devices + D, [](auto &e) { return e.discarded == 2; })) own.place = RESUMED;
    add(t, r, "has written one copy of a device again");
  }
}
static u8 all_have_discarded(State &t) {
  if (bounds.publish) continues_chain(t);
  return 0;
}
static void resumed(const State &s, int r) {
  meet(s, r, 0, all_have_discarded, [](State &t, Rank &own, u8) {
    const u8 version = version_of(own.contents);
    if (continues(t, t.reported, version)) t.reported = version;
    t.undone |= t.doubtful & ~(1 << version), t.doubtful = 0;
    own.place = BETWEEN, own.commit = {}, own.publisher.number = t.published_number + 1;
    for (Device &d : own.devices) d.adopted = d.discarded = 0;
    return "has resumed";
  });
}

// The next call of the program, which is the same on all ranks; or close(); or a step that begins in backward.
static void between_calls(const State &s, int r) {
  const Rank &own = s.ranks[r];
  State t = s;
  Rank &k = t.ranks[r];
  auto begin = [&](u8 call, const char *action, u8 &left, bool may) {
    if (!left || !may) return;
    left--, k.call = call, k.n_calls ^= 1, k.place = MEETS;
    add(t, r, action);
    t = s;
  };
  u8 is_first = 1, is_free = s.n_versions < bounds.versions;
  for (const Rank &q : s.ranks)
    if (is_there(q) && q.n_calls != own.n_calls) begin(q.call, "the same call", is_first, true);
  begin(STEP, "step()", is_free, is_first);
  is_free = is_first && s.n_versions < bounds.versions;
  begin(STEP_JOINED, "step() with parameters that join", t.left.manifest, is_free);
  begin(STEP_LEFT, "step() after a parameter has left", t.left.leave, is_free && own.contents && !own.leaving);
  begin(LOAD, "loading()", t.left.load, is_free && own.contents);
  begin(SYNC, "synchronize()", t.left.sync, is_first && own.contents);
  begin(SAVE, "edits states, then save()", t.left.edit, is_first && own.contents);
  k.place = CLOSES;
  if (bounds.close) add(t, r, "close()");
  // overlap.py: Overlap._may_begin; it is undone if it was no step
  if (!bounds.guess || !bounds.overlap || R == 1 || !own.contents || (own.vote != NO_VOTE && own.vote != KEPT)) return;
  const bool is_confirmed = !own.unconfirmed && !own.uncommitted && !next_is_round(s, own);
  const bool has_copy_0 = !own.commit.work || (own.commit.work == COMPLETE && own.commit.progress == RUNS);
  t = s, overwrite(t, r, GARBAGE);
  if ((is_confirmed || mutant == guess_before_confirmation) && has_copy_0 && memcmp(&t, &s, sizeof s))
    add(t, r, "begins a step in backward");
}

// agreement.py: agree_on_step; durable.py: DurableCommitter.confirm, own_round: what all ranks do before a call
static void own_round(const State &s, int r) {
  const Call call = (Call)s.ranks[r].call;
  const bool is_step = call == STEP || call == STEP_JOINED || call == STEP_LEFT;
  const bool loads = call == LOAD && s.ranks[r].place == OWN_ROUND;
  State t = s;
  Rank &own = t.ranks[r];
  const bool is_due = next_is_round(s, own);
  Waited waited = DONE;
  if (!own.posted[PROGRAM]) {
    for (Device &d : own.devices)
      if (!own.contents && !d.is_new) {  // file.py: StoreFile.allocate: states join
        d = {.has_file = 1, .is_new = 1};
        return add(t, r, "makes a store file");
      }
    if (R > 1) waited = is_due ? wait(s, r) : wait_for_copy_0(s, r);
    if (waited == NOT_YET) return;
    if (waited == DONE && is_due) {
      commit(s, own, false);
      return add(t, r, "own_round() begins a commit");
    }
  }
  auto compare = [&](State &t) {
    const u8 result = compare_rounds(t);
    if (!(result & (RAISES | DIFFER)) && (is_step || loads)) new_version(t, is_step);
    return result;
  };
  meet(s, r, waited == RAISED ? u8(LACKS) : own.notes.round, compare, [&](State &t, Rank &own, u8 result) {
    if (result & (RAISES | DIFFER)) return end_call(own), "raises: not all have the last round";
    count_ballots(t, r, result & WATCH_FAILED);
    if (mutant != highest_not_exchanged) own.highest = t.highest;
    own.place = is_step ? BEGINS : loads ? LOADS : call == SAVE ? SAVES : WAITS, own.version = t.n_versions;
    if (call == STEP_JOINED) own.description++, own.notes.has_manifest = 0;  // manifests.py: Manifests.describe
    if (call == STEP_LEFT && !own.leaving) own.leaving = LEAVES;
    return is_step ? "all have the last round, and agree on a step" : "all have the last round";
  });
}

static void leaves(State t, int r) {  // commits.py: Commits.free
  Rank &own = t.ranks[r];
  own.leaving = FREED;
  if (own.commit.work && !own.commit.is_staged) own.commit.copy.left = GARBAGE;
  if (mutant == gives_back_at_once) give_back(own);
  add(t, r, "a parameter leaves");
}
static void begins(State t, int r) {  // durable.py: DurableCommitter.before_joining_or_leaving, before_step
  Rank &own = t.ranks[r];
  if (own.leaving == LEAVES && mutant == leaves_before_commit) return leaves(t, r);
  const bool is_due = own.uncommitted && mutant != step_over_withdrawn_load;
  const Waited waited = is_due || own.leaving == LEAVES ? wait(t, r) : wait_for_copy_0(t, r);
  if (waited == NOT_YET) return;
  if (waited == DONE && is_due) {
    commit(t, own, false);
    return add(t, r, "before_step() commits");
  }
  if (waited == DONE && own.leaving == LEAVES) return leaves(t, r);
  if (waited == DONE) {
    overwrite(t, r, GARBAGE);
    own.place = ENDS;
    return add(t, r, "the step begins");
  }
  own.has_landed = own.is_complete = 0;
  if (is_overlapped(own)) own.vote = VOTING, end_call(own);
  else own.place = TELLS_END;
  add(t, r, "the step cannot begin");
}
static void ends(const State &s, int r) {  // engine.py: Engine.finish: complete, or undone here, as it has failed here
  State t = s;
  Rank &own = t.ranks[r];
  const bool goes_on = is_overlapped(own), meets = R > 1 && !goes_on;
  own.before = own.contents, own.contents = 2 * own.version, own.slot ^= 1;
  own.uncommitted = own.has_landed = own.is_complete = 1, own.place = meets ? TELLS_END : COMMITS;
  for (Device &d : own.devices) write(d, own.slot, own.contents);
  if (bounds.publish) own.publisher.due = own.publisher.unnamed = own.version;
  add(t, r, "the step is complete");
  if (!s.left.stepfail) return;
  t = s, t.left.stepfail--, own.has_landed = own.is_complete = 0, own.place = TELLS_END;
  if (goes_on) own.vote = VOTING;
  if (!meets) end_call(own);
  add(t, r, "the step FAILS here, and is undone");
}
static void commits(State t, int r) {  // history.py: StepHistory.commit
  const Waited waited = wait(t, r);
  if (waited == NOT_YET) return;
  Rank &own = t.ranks[r];
  own.due_record = own.version;
  if (waited == DONE) commit(t, own, false);
  if (is_overlapped(own) && own.before) own.vote = VOTING;
  else own.has_landed = 0;
  end_call(own);
  add(t, r, waited == DONE ? "its commit begins" : "its commit cannot begin");
}
static const char *take_back(State &t, Rank &own, u8 raises) {  // live.py: LiveStep.run, take_back
  own.place = COMMITS;
  if (!raises) return "all have the step";
  undo_step(t, own);
  end_call(own);
  own.vote = NO_VOTE;
  return "step() raises on all ranks, and the step is undone";
}

static void loads(State t, int r) {  // durable.py: DurableCommitter.loading, writing: the body
  const Waited waited = wait(t, r);
  if (waited == NOT_YET) return;
  Rank &own = t.ranks[r];
  if (waited == DONE && own.uncommitted && mutant != load_over_withdrawn_load) {
    commit(t, own, true);
    return add(t, r, "loading() commits the states before it");
  }
  own.place = LOADED, own.raised = waited == RAISED;
  if (waited == RAISED) return add(t, r, "cannot load states");
  overwrite(t, r, 2 * own.version);
  own.before = own.contents, own.contents = 2 * own.version, own.slot ^= 1, own.due_record = own.version;
  own.uncommitted = own.is_forced = 1;
  add(t, r, "loads states");
  if (!t.left.loadfail) return;
  t.left.loadfail--, own.raised = 1;
  for (Device &d : own.devices) write(d, own.slot, GARBAGE);
  add(t, r, "loads some states, and RAISES");
}
static const char *end_body(State &t, Rank &own, u8 raises) {
  own.place = FLUSHES;
  if (!raises) return "all have loaded";
  undo_load(t, own, false);
  end_call(own);
  return "loading() raises: some rank has not loaded";
}
static void flushes(State t, int r, Place next) {  // durable.py: DurableCommitter.flush
  const Waited waited = wait(t, r);
  if (waited == NOT_YET) return;
  Rank &own = t.ranks[r];
  const bool saves = next == SAVED && waited == DONE;
  if (saves && own.uncommitted && mutant != edit_over_withdrawn_load) {
    commit(t, own, true);
    return add(t, r, "flush() commits the states before the edits");
  }
  own.place = next, own.raised = waited == RAISED;
  if (saves && r == 0 && !(own.contents & 1)) {
    overwrite(t, r, own.contents | 1);
    own.contents |= 1, own.slot ^= 1;
  }
  if (waited == DONE) commit(t, own, true);
  add(t, r, waited == DONE ? "flush() commits" : "flush() raises");
}
static const char *end_loading(State &t, Rank &own, u8 raises) {  // durable.py: DurableCommitter.loading
  const bool stays = R == 1 && own.commit.is_prepared;            // then copy 1 is written later
  if (raises && !stays) undo_load(t, own, !own.raised);
  if (raises || R == 1) end_call(own);
  else own.place = OWN_LOAD;
  return raises ? "loading() raises: some flush has failed" : "all have flushed";
}
static const char *end_waiting(State &, Rank &own, u8) { return end_call(own), "returns, or raises"; }

static void closes(State t, int r) {  // durable.py: DurableCommitter.before_close
  Rank &own = t.ranks[r];
  const Waited waited = own.place == COMMITS_LAST && own.commit.progress != RUNS ? RAISED : wait(t, r);
  if (waited == NOT_YET) return;
  if (waited == RAISED || own.unconfirmed || next_is_round(t, own) || !own.contents || own.is_lost)
    return end_process(t, r, CLOSED, "is closed");
  commit(t, own, true);
  own.place = COMMITS_LAST;
  add(t, r, "close() commits");
}

static void rank_actions(const State &s, int r) {
  const Rank &own = s.ranks[r];
  const bool is_busy = own.commit.progress == RUNS, has_posted = own.posted[PROGRAM];
  State t = s;
  Rank &k = t.ranks[r];
  const bool may_die =
      s.left.kills || std::any_of(s.ranks, s.ranks + R, [](auto &q) { return q.place == DEAD || q.place == LOST; });
  if (is_there(own) && may_die) end_process(s, r, DEAD, "KILLED");
  background(s, r);
  votes(s, r);
  if (r == 0 && own.publisher.naming) names_version(s);
  switch (own.place) {
    case OPENS:
      return opens(s, r);
    case DISCARDS:
      return discards(s, r);
    case RESUMED:
      return resumed(s, r);
    case BETWEEN:
      return between_calls(s, r);
    case MEETS:  // together.py: Together.agree
      if (own.vote == MUST_MEET && !(has_posted && own.unconfirmed && is_busy))
        meet(s, r, !own.is_complete, any_raises, take_back);
      if (own.vote != NO_VOTE && own.vote != KEPT && own.vote != VOTE_LOST) return;
      k.place = own.vote == VOTE_LOST ? LOST : OWN_ROUND, k.vote = NO_VOTE;
      return add(t, r, own.vote == VOTE_LOST ? "has lost others in the vote" : "has met the others");
    case OWN_ROUND:
    case OWN_LOAD:
      return own_round(s, r);
    case BEGINS:
      return begins(s, r);
    case ENDS:
      return ends(s, r);
    case TELLS_END:
      return meet(s, r, !own.has_landed, any_raises, take_back);
    case COMMITS:
      return commits(s, r);
    case LOADS:
      return loads(s, r);
    case LOADED:
      return meet(s, r, own.raised, any_raises, end_body);
    case FLUSHES:
      return flushes(s, r, FLUSHED);
    case FLUSHED:
      if (!is_busy) meet(s, r, own.raised || own.commit.progress == FAILS, any_raises, end_loading);
      return;
    case SAVES:
      return flushes(s, r, SAVED);
    case WAITS:  // durable.py: DurableCommitter.wait
      if (has_posted || wait(s, r) != NOT_YET) meet(s, r, 0, any_raises, end_waiting);
      return;
    case SAVED:
      if (!is_busy) meet(s, r, 0, any_raises, end_waiting);
      return;
    case CLOSES:
    case COMMITS_LAST:
      return closes(s, r);
    case LOST:
      k.place = CLOSES;
      if (bounds.close && !is_busy) add(t, r, "closes, as it has lost others");
  }
}

// All are started again, with resume=True; perhaps without a drive, or without a rank's directory.
static void start_again(State s) {
  for (Rank &k : s.ranks) k.place = OPENS;
  s.left.kills--;
  add(s, -1, "all are started again");
  if (!s.left.missing) return;
  s.left.missing--;
  for (int r = 0; r < R; r++)
    for (int i = 0; i < D + (D > 1); i++) {  // D: all devices of the rank
      State t = s;
      for (int k = 0; k < D; k++)
        if (i == k || i == D) t.ranks[r].devices[k] = {};
      bool any_file = false;
      for (const Rank &k : t.ranks)
        for (const Device &d : k.devices) any_file |= d.has_file;
      // Without any file it looks like the very first start. If the resume refuses, all stays: the drive may return.
      if (!any_file || recover(t) != ANEW) continue;
      if (t.reported || t.published) violation = "I2: begins anew without a drive, after a version was reported";
      add(t, -1, "all are started again, and a drive or directory is missing");
    }
}

static void find_successors(const State &s, std::vector<Next> &found) {
  nexts = &found;
  found.clear(), violation.clear();
  for (int r = 0; r < R && violation.empty(); r++) rank_actions(s, r);
  if (!none_there(s)) return;
  check_resume(s);
  if (violation.empty() && s.left.kills) start_again(s);
}

// ---- the search -----------------------------------------------------------------------------------------------------

template <class T>
static void sort_as_memory(T *first, int n) {
  for (int a = 0; a < n; a++)
    for (int b = a + 1; b < n; b++)
      if (memcmp(first + b, first + a, sizeof(T)) < 0) std::swap(first[a], first[b]);
}
static State without_names(State s) {  // states that differ only in which device, or rank, is which are one
  for (Rank &k : s.ranks) sort_as_memory(k.devices, D);
  if (!bounds.publish && !bounds.edit) sort_as_memory(s.ranks, R);
  return s;
}

class Visited {  // states in the order in which they were found, and a hash table of their numbers plus 1
 public:
  const State &operator[](uint32_t i) const { return chunks_[i / CHUNK][i % CHUNK]; }
  uint32_t size() const { return parents_.size(); }
  uint32_t parent(uint32_t i) const { return parents_[i]; }
  void insert(const State &s, uint32_t parent) {
    if (2 * parents_.size() >= table_.size()) {
      table_.assign(std::max<size_t>(1 << 16, 2 * table_.size()), 0);
      for (uint32_t i = 0; i < size(); i++) place_of((*this)[i]) = i + 1;
    }
    uint32_t &place = place_of(s);
    if (place) return;
    if (size() % CHUNK == 0) chunks_.emplace_back(new State[CHUNK]);
    chunks_.back()[size() % CHUNK] = s;
    parents_.push_back(parent);
    place = size();
  }

 private:
  static constexpr uint32_t CHUNK = 1 << 12;
  uint32_t &place_of(const State &s) {
    uint64_t hash = 0, word = 0;
    for (size_t i = 0; i < sizeof s; i += sizeof word) {
      memcpy(&word, (const u8 *)&s + i, std::min(sizeof word, sizeof s - i));
      hash = (hash ^ word) * 0x9E3779B97F4A7C15ull, hash ^= hash >> 29;
    }
    for (hash ^= hash >> 32;; hash++)
      if (uint32_t &place = table_[hash & (table_.size() - 1)]; !place || !memcmp(&(*this)[place - 1], &s, sizeof s))
        return place;
  }
  std::vector<std::unique_ptr<State[]>> chunks_;
  std::vector<uint32_t> parents_, table_;
};
constexpr uint32_t NO_PARENT = UINT32_MAX;

static int print_violation(const Visited &visited, uint32_t last) {  // with the actions that lead to it
  printf("VIOLATION %s; %u states\n", violation.c_str(), visited.size());
  std::vector<uint32_t> path;
  for (uint32_t i = last; i != NO_PARENT; i = visited.parent(i)) path.insert(path.begin(), i);
  is_tracing = true;
  std::vector<Next> found;
  for (size_t n = 1; n < path.size(); n++) {
    find_successors(visited[path[n - 1]], found);
    for (const Next &next : found)
      if (State t = without_names(next.state); !memcmp(&t, &visited[path[n]], sizeof t)) {
        printf("  %3zu %s\n", n, next.action.c_str());
        break;
      }
  }
  return 1;
}

static State initial() {
  State s{};
#define SET(name, _) s.left.name = bounds.name;
  BUDGETS(SET)
#undef SET
  for (Rank &k : s.ranks) {
    k.place = BETWEEN, k.description = 1, k.publisher.number = 1 + !bounds.first;
    if (bounds.first) continue;
    k.contents = 2, k.sequence = 1, k.highest = R > 1;
    k.notes = {.record = 1, .has_manifest = 1, .round = R > 1, .step = 1};
    const Copy copy = {.sequence = 1, .round = R > 1, .contents = 2, .record = 1, .manifest = 1, .right_manifest = 1};
    for (Device &d : k.devices) {
      d = {.has_file = 1, .disk = {2, 0, 1, 0}, .manifests = {1, 1}, .copies = {copy, copy}};
      memcpy(d.seen, d.disk, sizeof d.disk), d.manifest = 1;
    }
  }
  if (!bounds.first) s.n_versions = s.steps[1] = s.reported = 1, s.published = s.published_number = bounds.publish;
  return s;
}

static bool set_option(const std::string &option) {
  const size_t equals = option.find('=');
  const std::string key = option.substr(0, equals), value = option.substr(std::min(equals, option.size() - 1) + 1);
#define SET(name, _) \
  if (key == #name) return bounds.name = atoi(value.c_str()), true;
  BOUNDS(SET)
#undef SET
#define SET(name) \
  if (value == #name) return mutant = name, key == "mutant";
  MUTANTS(SET)
#undef SET
  return false;
}

int main(int n, char **options) {
  for (int i = 1; i < n; i++)
    if (!set_option(options[i])) return printf("unknown option: %s\n", options[i]), 2;
  if (bounds.versions > MOST_VERSIONS) return printf("at most %d versions\n", MOST_VERSIONS), 2;
  Visited visited;
  std::vector<Next> found;
  long n_crashes = 0;
  visited.insert(without_names(initial()), NO_PARENT);
  for (uint32_t i = 0; i < visited.size(); i++) {
    const State s = visited[i];
    find_successors(s, found);
    const bool rests = std::all_of(s.ranks, s.ranks + R, [](auto &k) { return !is_there(k) || k.place == BETWEEN; });
    if (found.empty() && !rests && violation.empty()) violation = "I5: nobody can go on";
    if (!violation.empty()) return print_violation(visited, i);
    n_crashes += none_there(s);
    for (const Next &next : found) visited.insert(without_names(next.state), i);
    if (visited.size() > (uint32_t)bounds.most) return printf("NOT exhaustive: %u states\n", visited.size()), 3;
  }
  printf("no violation: %u states, %ld crashes checked\n", visited.size(), n_crashes);
}
