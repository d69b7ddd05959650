/* SPDX-License-Identifier: MIT OR Apache-2.0
 *
 * What the program and its reader share. src/wire.rs has the same in Rust; opening a map compares
 * the sizes of keys and values.
 */
#ifndef DEFUSE_STAGES_H
#define DEFUSE_STAGES_H

#include "kernel.h"

#define BUCKETS 32
#define NAME_SIZE 256
#define CONNECTIONS_OF_DAEMON 8

/* Which part of a request's life a histogram is of. */
enum stage {
	STAGE_BACKGROUND,
	STAGE_PENDING,
	STAGE_PROCESSING,
	/* Pending and processing of a request that nobody was seen to take. */
	STAGE_UNSPLIT,
	STAGE_TOTAL,
};

/* What could not be counted as it should. */
enum loss {
	LOSS_FLIGHTS_FULL,
	LOSS_HISTOGRAMS_FULL,
	LOSS_EVENTS,
	LOSS_CREATION_UNSEEN,
	LOSS_COUNT,
};

struct histogram_key {
	u32 connection;
	u16 opcode;
	u16 stage;
};

struct histogram {
	u64 buckets[BUCKETS];
	u64 errors;
	u64 sum_ns;
	u64 min_ns;
	u64 max_ns;
	u64 bytes;
};

struct flight_key {
	u64 unique;
	u32 connection;
	u32 zero;
};

#define FLIGHT_BACKGROUND 1

/* A request between its sending and its end. Times are CLOCK_MONOTONIC, 0 for none. */
struct flight {
	u64 created_ns;
	u64 sent_ns;
	u64 taken_ns;
	u64 nodeid;
	u32 opcode;
	u32 flags;
	u32 taker;
	u32 zero;
};

/* Who made a request, and when; by the request's address. */
struct creation {
	u64 at_ns;
	u32 tgid;
	u32 zero;
	char comm[16];
};

/* The connections whose device a process has open; 0 for none. */
struct daemon {
	u32 connections[CONNECTIONS_OF_DAEMON];
};

/* One request, for `trace`. The names are left out where there are none. */
struct event {
	u64 unique;
	u64 nodeid;
	u64 child;
	u64 offset;
	u64 created_ns;
	u64 sent_ns;
	u64 taken_ns;
	u64 ended_ns;
	u32 connection;
	u32 opcode;
	s32 error;
	u32 flags;
	u32 in_len;
	u32 out_len;
	u32 size;
	u32 pid;
	u32 taker;
	u32 names;
	char comm[16];
	char name[NAME_SIZE];
	char name2[NAME_SIZE];
};

#endif
