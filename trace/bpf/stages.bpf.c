/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * Follows every FUSE request through the kernel: made, sent, taken by the daemon, answered.
 *
 * Only BTF tracepoints are used, which are permitted where kprobes and fentry are not. One
 * program each; the loader attaches those that it needs:
 *
 *   on_alloc    kmem_cache_alloc        a request is made: background requests begin to wait
 *   on_send     fuse_request_send       it enters the pending queue
 *   on_exit     sys_exit                a daemon's read(2), readv(2) or splice(2) returns with it
 *   on_ring     io_uring_complete       a daemon's ring delivers it
 *   on_end      fuse_request_end        it is answered
 *
 * Histograms are as defuse_probe::Histogram has them. `cargo xtask bpf` compiles this file.
 */
#include "stages.h"

/* A licence that the kernel takes for the helpers that read memory. */
char _license[] SEC("license") = "Dual MIT/GPL";

/* Set by the loader, constant for the verifier. */
const volatile u32 only_connection = 0; /* 0: all */
const volatile u8 with_events = 0;
const volatile u8 only_errors = 0;
const volatile u32 only_pid = 0;   /* of the caller; 0: all */
const volatile u64 only_ops = 0;   /* a bit for each opcode below 64; 0: all */
const volatile u64 slower_than = 0; /* ns */
const volatile char cache_name[32] = {}; /* of the slab cache that requests come from, in sysfs */

struct {
	MAP_UINT(type, MAP_PERCPU_HASH);
	MAP_UINT(max_entries, 8192);
	MAP_UINT(map_flags, NO_PREALLOC);
	MAP_TYPE(key, struct histogram_key);
	MAP_TYPE(value, struct histogram);
} histograms SEC(".maps");

struct {
	MAP_UINT(type, MAP_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_TYPE(key, struct flight_key);
	MAP_TYPE(value, struct flight);
} flights SEC(".maps");

struct {
	MAP_UINT(type, MAP_LRU_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_TYPE(key, u64);
	MAP_TYPE(value, struct creation);
} creations SEC(".maps");

struct {
	MAP_UINT(type, MAP_HASH);
	MAP_UINT(max_entries, 16384);
	MAP_UINT(map_flags, NO_PREALLOC);
	MAP_TYPE(key, struct flight_key);
	MAP_TYPE(value, struct event);
} details SEC(".maps");

/* By process: whose device files it has open. Filled by the loader. */
struct {
	MAP_UINT(type, MAP_HASH);
	MAP_UINT(max_entries, 4096);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, struct daemon);
} daemons SEC(".maps");

/* By thread: when its last splice(2) from the device returned. */
struct {
	MAP_UINT(type, MAP_LRU_HASH);
	MAP_UINT(max_entries, 8192);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u64);
} splices SEC(".maps");

struct {
	MAP_UINT(type, MAP_PERCPU_ARRAY);
	MAP_UINT(max_entries, LOSS_COUNT);
	MAP_TYPE(key, u32);
	MAP_TYPE(value, u64);
} losses SEC(".maps");

struct {
	MAP_UINT(type, MAP_RINGBUF);
	MAP_UINT(max_entries, 4194304);
} events SEC(".maps");

/* What maps get where they have nothing yet: too large for the stack. */
static const struct histogram no_histogram = {};
static const struct event no_event = {};

/* The cache of requests, once it was seen. */
static u64 request_cache = 0;

INLINE void lose(u32 what)
{
	u64 *count = map_lookup(&losses, &what);
	if (count)
		*count += 1;
}

/* floor(log2(value)), in six steps. */
INLINE u32 log2_of(u64 value)
{
	u32 log = 0;
	if (value >> 32) { value >>= 32; log += 32; }
	if (value >> 16) { value >>= 16; log += 16; }
	if (value >> 8) { value >>= 8; log += 8; }
	if (value >> 4) { value >>= 4; log += 4; }
	if (value >> 2) { value >>= 2; log += 2; }
	if (value >> 1) log += 1;
	return log;
}

/* Bucket N is from 2^(N+1) to 2^(N+2) ns (FAST '17, section 3.2). */
INLINE u32 bucket_of(u64 ns)
{
	u32 log = log2_of(ns | 1);
	u32 bucket = log > 0 ? log - 1 : 0;
	return bucket < BUCKETS ? bucket : BUCKETS - 1;
}

INLINE struct histogram *histogram_of(const struct histogram_key *key)
{
	struct histogram *found = map_lookup(&histograms, key);
	if (found)
		return found;
	/* Another processor may have made it meanwhile. */
	map_update(&histograms, key, &no_histogram, UPDATE_NOEXIST);
	return map_lookup(&histograms, key);
}

INLINE void count(const struct flight_key *flight, u32 opcode, u32 stage, u64 ns, s32 error,
		  u64 bytes)
{
	struct histogram_key key = {
		.connection = flight->connection,
		.opcode = opcode,
		.stage = stage,
	};
	struct histogram *histogram = histogram_of(&key);
	if (!histogram) {
		lose(LOSS_HISTOGRAMS_FULL);
		return;
	}
	u32 bucket = bucket_of(ns);
	if (bucket < BUCKETS)
		histogram->buckets[bucket] += 1;
	histogram->sum_ns += ns;
	if (ns > histogram->max_ns)
		histogram->max_ns = ns;
	/* One too much, so that 0 stands for none. */
	if (histogram->min_ns == 0 || ns + 1 < histogram->min_ns)
		histogram->min_ns = ns + 1;
	if (error)
		histogram->errors += 1;
	histogram->bytes += bytes;
}

INLINE struct flight_key key_of(const struct fuse_req *req)
{
	struct flight_key key = {
		.unique = req->in.h.unique,
		.connection = req->fm->fc->dev,
	};
	return key;
}

INLINE int is_wanted(u32 connection)
{
	return only_connection == 0 || connection == only_connection;
}

/* Whether `name` is that of the cache of requests. The cache may be shared with others of its
 * size, under a name of neither; sysfs has one name for all of them. */
INLINE int is_request_cache(const char *name)
{
	char text[sizeof(cache_name)] = {};
	if (read_kernel_str(text, sizeof(text), name) < 0)
		return 0;
	for (u32 i = 0; i < sizeof(text); i++) {
		if (text[i] != cache_name[i])
			return 0;
		if (!text[i])
			return i > 0;
	}
	return 0;
}

SEC("tp_btf/kmem_cache_alloc")
int on_alloc(u64 *ctx)
{
	struct kmem_cache *cache = (void *)ctx[2];
	if ((u64)cache != request_cache) {
		/* There is one such cache, so every other has to be compared only until it is seen. */
		if (request_cache || !is_request_cache(cache->kobj.name))
			return 0;
		request_cache = (u64)cache;
	}
	u64 address = ctx[1];
	struct creation creation = {
		.at_ns = now_ns(),
		.tgid = current_pid_tgid() >> 32,
	};
	if (with_events)
		current_comm(creation.comm, sizeof(creation.comm));
	map_update(&creations, &address, &creation, UPDATE_ANY);
	return 0;
}

enum opcode {
	OP_LOOKUP = 1,
	OP_SYMLINK = 6,
	OP_MKNOD = 8,
	OP_MKDIR = 9,
	OP_UNLINK = 10,
	OP_RMDIR = 11,
	OP_RENAME = 12,
	OP_LINK = 13,
	OP_READ = 15,
	OP_WRITE = 16,
	OP_SETXATTR = 21,
	OP_GETXATTR = 22,
	OP_REMOVEXATTR = 24,
	OP_READDIR = 28,
	OP_CREATE = 35,
	OP_READDIRPLUS = 44,
	OP_RENAME2 = 45,
};

#define OP_BIT(op) (1ULL << (op))
/* The first argument is a name, or empty and the second is. */
#define NAME_FIRST \
	(OP_BIT(OP_LOOKUP) | OP_BIT(OP_SYMLINK) | OP_BIT(OP_UNLINK) | OP_BIT(OP_RMDIR) | \
	 OP_BIT(OP_REMOVEXATTR))
/* A structure, then a name. */
#define NAME_SECOND \
	(OP_BIT(OP_MKNOD) | OP_BIT(OP_MKDIR) | OP_BIT(OP_RENAME) | OP_BIT(OP_LINK) | \
	 OP_BIT(OP_SETXATTR) | OP_BIT(OP_GETXATTR) | OP_BIT(OP_CREATE) | OP_BIT(OP_RENAME2))
#define TWO_NAMES (OP_BIT(OP_SYMLINK) | OP_BIT(OP_RENAME) | OP_BIT(OP_RENAME2))
/* The structure begins with handle, offset and size. */
#define HAS_RANGE \
	(OP_BIT(OP_READ) | OP_BIT(OP_WRITE) | OP_BIT(OP_READDIR) | OP_BIT(OP_READDIRPLUS))
/* The answer begins with the number of an inode. */
#define HAS_CHILD \
	(OP_BIT(OP_LOOKUP) | OP_BIT(OP_SYMLINK) | OP_BIT(OP_MKNOD) | OP_BIT(OP_MKDIR) | \
	 OP_BIT(OP_LINK) | OP_BIT(OP_CREATE))

INLINE int is_one_of(u32 opcode, u64 ops)
{
	return opcode < 64 && (ops >> opcode & 1);
}

/* The names lie in the kernel, in a cache entry that the caller holds while it waits. */
INLINE void note_names(struct event *event, struct fuse_args *args)
{
	u32 opcode = event->opcode;
	if (!is_one_of(opcode, NAME_FIRST | NAME_SECOND))
		return;
	const void *name = args->in_args[1].value, *name2 = args->in_args[2].value;
	if (is_one_of(opcode, NAME_FIRST) && args->in_args[0].size != 0) {
		name = args->in_args[0].value;
		name2 = args->in_args[1].value;
	}
	event->names = 1;
	read_kernel_str(event->name, sizeof(event->name), name);
	if (is_one_of(opcode, TWO_NAMES)) {
		event->names = 2;
		read_kernel_str(event->name2, sizeof(event->name2), name2);
	}
}

INLINE void note_range(struct event *event, struct fuse_args *args)
{
	struct {
		u64 handle;
		u64 offset;
		u32 size;
	} range = {};
	if (!is_one_of(event->opcode, HAS_RANGE))
		return;
	if (read_kernel(&range, 20, args->in_args[0].value) == 0) {
		event->offset = range.offset;
		event->size = range.size;
	}
}

/* Keeps what only the moment of sending can tell. */
INLINE void note_details(const struct fuse_req *req, const struct flight_key *key,
			 const struct flight *flight, const struct creation *creation)
{
	if (only_ops && !is_one_of(flight->opcode, only_ops))
		return;
	/* The daemon is told of the thread, which is of less use. A background request is sent by
	 * whoever makes room for it. */
	u32 pid = current_pid_tgid() >> 32;
	if (flight->flags & FLIGHT_BACKGROUND)
		pid = creation ? creation->tgid : 0;
	if (only_pid && pid != only_pid)
		return;
	if (map_update(&details, key, &no_event, UPDATE_ANY) != 0) {
		lose(LOSS_EVENTS);
		return;
	}
	struct event *event = map_lookup(&details, key);
	if (!event)
		return;
	event->unique = key->unique;
	event->connection = key->connection;
	event->nodeid = flight->nodeid;
	event->opcode = flight->opcode;
	event->in_len = req->in.h.len;
	event->pid = pid;
	if (!(flight->flags & FLIGHT_BACKGROUND))
		current_comm(event->comm, sizeof(event->comm));
	else if (creation)
		__builtin_memcpy(event->comm, creation->comm, sizeof(event->comm));
	note_names(event, req->args);
	note_range(event, req->args);
}

SEC("tp_btf/fuse_request_send")
int on_send(u64 *ctx)
{
	const struct fuse_req *req = (void *)ctx[0];
	struct flight_key key = key_of(req);
	if (!is_wanted(key.connection))
		return 0;
	u64 address = (u64)req;
	struct creation *creation = map_lookup(&creations, &address);
	struct flight flight = {
		.sent_ns = now_ns(),
		.nodeid = req->in.h.nodeid,
		.opcode = req->in.h.opcode,
	};
	if (req->flags >> ENUM_VALUE(enum fuse_req_flag, FR_BACKGROUND) & 1)
		flight.flags = FLIGHT_BACKGROUND;
	if (creation)
		flight.created_ns = creation->at_ns;
	if (map_update(&flights, &key, &flight, UPDATE_ANY) != 0) {
		lose(LOSS_FLIGHTS_FULL);
		return 0;
	}
	if (with_events)
		note_details(req, &key, &flight, creation);
	return 0;
}

enum syscall {
	SYS_READ = 0,
	SYS_READV = 19,
	SYS_SPLICE = 275,
};

/* Whether `header`, found in a daemon's buffer, is that of the request in flight. */
INLINE int is_of(const struct flight *flight, const struct fuse_in_header *header)
{
	return flight->opcode == header->opcode && flight->nodeid == header->nodeid;
}

INLINE void take(const struct fuse_in_header *header, u32 connection, u64 at_ns)
{
	struct flight_key key = { .unique = header->unique, .connection = connection };
	struct flight *flight = map_lookup(&flights, &key);
	if (!flight || flight->taken_ns || !is_of(flight, header))
		return;
	u32 thread = current_pid_tgid();
	/* Libraries splice a request into a pipe first, and read its header from there. */
	u64 *spliced_ns = map_lookup(&splices, &thread);
	if (spliced_ns && *spliced_ns > flight->sent_ns)
		at_ns = *spliced_ns;
	flight->taken_ns = at_ns;
	flight->taker = thread;
}

SEC("tp_btf/sys_exit")
int on_exit(u64 *ctx)
{
	struct pt_regs *regs = (void *)ctx[0];
	s64 returned = ctx[1];
	u64 call = regs->orig_ax;
	if (call != SYS_READ && call != SYS_READV && call != SYS_SPLICE)
		return 0;
	if (returned < (s64)sizeof(struct fuse_in_header))
		return 0;
	u64 thread_and_process = current_pid_tgid();
	u32 process = thread_and_process >> 32, thread = thread_and_process;
	struct daemon *daemon = map_lookup(&daemons, &process);
	if (!daemon)
		return 0;
	u64 at_ns = now_ns();
	if (call == SYS_SPLICE) {
		map_update(&splices, &thread, &at_ns, UPDATE_ANY);
		return 0;
	}
	const void *buffer = (void *)regs->si;
	if (call == SYS_READV && read_user(&buffer, sizeof(buffer), (void *)regs->si) != 0)
		return 0;
	struct fuse_in_header header = {};
	if (read_user(&header, sizeof(header), buffer) != 0)
		return 0;
	for (u32 i = 0; i < CONNECTIONS_OF_DAEMON; i++) {
		u32 connection = daemon->connections[i];
		if (connection == 0)
			break;
		take(&header, connection, at_ns);
	}
	return 0;
}

#define URING_CMD 46 /* IORING_OP_URING_CMD of linux/io_uring.h */

SEC("tp_btf/io_uring_complete")
int on_ring(u64 *ctx)
{
	struct io_kiocb *kiocb = (void *)ctx[1];
	u8 opcode = 0;
	if (read_kernel(&opcode, 1, FIELD_VALUE(kiocb->opcode)) != 0 || opcode != URING_CMD)
		return 0;
	u32 process = current_pid_tgid() >> 32;
	if (!map_lookup(&daemons, &process))
		return 0;
	/* The command's own data begins with the address of the entry, and that has the request. */
	struct io_uring_cmd *command = (void *)kiocb;
	struct fuse_ring_ent *entry = 0;
	struct fuse_req *req = 0;
	if (read_kernel(&entry, sizeof(entry), FIELD_VALUE(command->pdu)) != 0 || !entry)
		return 0;
	if (read_kernel(&req, sizeof(req), FIELD_VALUE(entry->fuse_req)) != 0 || !req)
		return 0;
	/* Any driver may be behind the command: what follows is believed only if it is in flight. */
	struct fuse_in_header header = {};
	struct fuse_mount *mount = 0;
	struct fuse_conn *conn = 0;
	u32 connection = 0;
	read_kernel(&header, sizeof(header), FIELD_VALUE(req->in.h));
	read_kernel(&mount, sizeof(mount), FIELD_VALUE(req->fm));
	read_kernel(&conn, sizeof(conn), FIELD_VALUE(mount->fc));
	read_kernel(&connection, sizeof(connection), FIELD_VALUE(conn->dev));
	take(&header, connection, now_ns());
	return 0;
}

INLINE u64 bytes_of(const struct fuse_req *req, u32 opcode)
{
	u32 in = req->in.h.len, out = req->out.h.len;
	if (req->out.h.error)
		return 0;
	if (opcode == OP_READ && out > sizeof(struct fuse_out_header))
		return out - sizeof(struct fuse_out_header);
	/* The header, and 40 bytes of struct fuse_write_in. */
	if (opcode == OP_WRITE && in > sizeof(struct fuse_in_header) + 40)
		return in - sizeof(struct fuse_in_header) - 40;
	return 0;
}

INLINE void count_stages(const struct flight_key *key, const struct flight *flight, u64 ended_ns,
			 s32 error, u64 bytes)
{
	u32 opcode = flight->opcode;
	u64 began_ns = flight->sent_ns;
	if (flight->flags & FLIGHT_BACKGROUND) {
		if (flight->created_ns) {
			began_ns = flight->created_ns;
			count(key, opcode, STAGE_BACKGROUND, flight->sent_ns - began_ns, error, 0);
		} else {
			lose(LOSS_CREATION_UNSEEN);
		}
	}
	if (flight->taken_ns) {
		u64 pending_ns = flight->taken_ns - flight->sent_ns;
		count(key, opcode, STAGE_PENDING, pending_ns, error, 0);
		count(key, opcode, STAGE_PROCESSING, ended_ns - flight->taken_ns, error, 0);
	} else {
		count(key, opcode, STAGE_UNSPLIT, ended_ns - flight->sent_ns, error, 0);
	}
	count(key, opcode, STAGE_TOTAL, ended_ns - began_ns, error, bytes);
}

INLINE void send_event(const struct fuse_req *req, const struct flight_key *key,
		       const struct flight *flight, u64 ended_ns)
{
	struct event *event = map_lookup(&details, key);
	if (!event)
		return;
	u64 began_ns = flight->sent_ns;
	if (flight->flags & FLIGHT_BACKGROUND && flight->created_ns)
		began_ns = flight->created_ns;
	event->error = req->out.h.error;
	if ((only_errors && !event->error) || ended_ns - began_ns < slower_than)
		goto done;
	event->created_ns = flight->created_ns;
	event->sent_ns = flight->sent_ns;
	event->taken_ns = flight->taken_ns;
	event->ended_ns = ended_ns;
	event->flags = flight->flags;
	event->taker = flight->taker;
	event->out_len = req->out.h.len;
	/* The caller may be awake already: then this is garbage at worst, and never a fault. */
	if (!event->error && is_one_of(event->opcode, HAS_CHILD))
		read_kernel(&event->child, sizeof(event->child), req->args->out_args[0].value);
	/* Sizes that the verifier sees as constant. */
	u64 size = event->names == 0   ? __builtin_offsetof(struct event, name)
		   : event->names == 1 ? __builtin_offsetof(struct event, name2)
				       : sizeof(struct event);
	if (ringbuf_output(&events, event, size, RINGBUF_NO_WAKEUP) != 0)
		lose(LOSS_EVENTS);
done:
	map_delete(&details, key);
}

SEC("tp_btf/fuse_request_end")
int on_end(u64 *ctx)
{
	const struct fuse_req *req = (void *)ctx[0];
	struct flight_key key = key_of(req);
	struct flight *flight = map_lookup(&flights, &key);
	if (!flight)
		return 0;
	u64 ended_ns = now_ns();
	count_stages(&key, flight, ended_ns, req->out.h.error, bytes_of(req, flight->opcode));
	if (with_events)
		send_event(req, &key, flight, ended_ns);
	map_delete(&flights, &key);
	return 0;
}
