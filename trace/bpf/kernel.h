/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * What the program needs of the kernel's types, and no more. Only the names of types and fields
 * count: the loader looks every one up in the running kernel's BTF (CO-RE), so the layout here
 * need not be the kernel's. Helpers and map types have numbers that never change (linux/bpf.h).
 */
#ifndef DEFUSE_KERNEL_H
#define DEFUSE_KERNEL_H

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef int s32;
typedef long long s64;

#define SEC(name) __attribute__((section(name), used))
#define CORE __attribute__((preserve_access_index))
#define INLINE static inline __attribute__((always_inline))

/* How libbpf and aya read a map's definition from the types of its fields. */
#define MAP_UINT(name, value) int(*name)[value]
#define MAP_TYPE(name, type) typeof(type) *name

enum {
	MAP_HASH = 1,
	MAP_ARRAY = 2,
	MAP_PERCPU_HASH = 5,
	MAP_PERCPU_ARRAY = 6,
	MAP_LRU_HASH = 9,
	MAP_RINGBUF = 27,
};
#define NO_PREALLOC 1
#define UPDATE_ANY 0
#define UPDATE_NOEXIST 1
#define RINGBUF_NO_WAKEUP 1

static void *(*map_lookup)(void *map, const void *key) = (void *)1;
static long (*map_update)(void *map, const void *key, const void *value, u64 flags) = (void *)2;
static long (*map_delete)(void *map, const void *key) = (void *)3;
static u64 (*now_ns)(void) = (void *)5;
static u64 (*current_pid_tgid)(void) = (void *)14;
static long (*current_comm)(void *out, u32 size) = (void *)16;
static long (*read_user)(void *out, u32 size, const void *from) = (void *)112;
static long (*read_kernel)(void *out, u32 size, const void *from) = (void *)113;
static long (*read_kernel_str)(void *out, u32 size, const void *from) = (void *)115;
static long (*ringbuf_output)(void *ring, void *data, u64 size, u64 flags) = (void *)130;

struct fuse_conn {
	u32 dev;
} CORE;

struct fuse_mount {
	struct fuse_conn *fc;
} CORE;

/* The protocol: the same on every kernel, and in the daemon's buffer (linux/fuse.h). */
struct fuse_in_header {
	u32 len;
	u32 opcode;
	u64 unique;
	u64 nodeid;
	u32 uid;
	u32 gid;
	u32 pid;
	u16 total_extlen;
	u16 padding;
};

struct fuse_out_header {
	u32 len;
	s32 error;
	u64 unique;
};

struct fuse_in_arg {
	u32 size;
	const void *value;
} CORE;

struct fuse_arg {
	u32 size;
	void *value;
} CORE;

struct fuse_args {
	u8 in_numargs;
	u8 out_numargs;
	struct fuse_in_arg in_args[4];
	struct fuse_arg out_args[2];
} CORE;

struct fuse_req {
	struct fuse_args *args;
	unsigned long flags;
	struct {
		struct fuse_in_header h;
	} in;
	struct {
		struct fuse_out_header h;
	} out;
	struct fuse_mount *fm;
} CORE;

enum fuse_req_flag {
	FR_BACKGROUND = 2,
};

/* FUSE over io_uring: the command that completes leads to the request that it carries. */
struct fuse_ring_ent {
	struct fuse_req *fuse_req;
} CORE;

struct io_uring_cmd {
	u32 cmd_op;
	u8 pdu[32];
} CORE;

struct io_kiocb {
	u8 opcode;
} CORE;

struct kobject {
	const char *name;
} CORE;

struct kmem_cache {
	const char *name;
	struct kobject kobj;
} CORE;

/* x86-64. The loader refuses other processors. */
struct pt_regs {
	unsigned long di;
	unsigned long si;
	unsigned long orig_ax;
} CORE;

#define FIELD_VALUE(place) __builtin_preserve_access_index(&(place))
#define ENUM_VALUE(type, value) __builtin_preserve_enum_value(*(type *)value, 1)

#endif
