//! Attacks by other users of the machine on the program.

mod common;

#[path = "attacks/filter.rs"]
mod filter;
#[path = "attacks/namespace.rs"]
mod namespace;
#[path = "attacks/paths.rs"]
mod paths;
#[path = "attacks/run.rs"]
mod run;
#[path = "attacks/sandbox.rs"]
mod sandbox;
#[path = "attacks/servers.rs"]
mod servers;
#[path = "attacks/set_user_id.rs"]
mod set_user_id;
#[path = "attacks/source_flags.rs"]
mod source_flags;
#[path = "attacks/space.rs"]
mod space;
#[path = "attacks/stale_names.rs"]
mod stale_names;
#[path = "attacks/terminal.rs"]
mod terminal;
#[path = "attacks/users.rs"]
mod users;
