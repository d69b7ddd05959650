//! The state of a process of a run: its mounts and open files, the effects of a fork and an
//! execve(2) on them, and the memory that all processes of the run share.
//!
//! It names the layer `machine`.

#[allow(unsafe_code)]
pub mod arena;
pub mod compose;
#[allow(unsafe_code)]
pub mod credentials;
pub mod exec_state;
#[allow(unsafe_code)]
pub mod fork;
pub mod holders;
pub mod kernel_cwd;
pub mod opened_by;
pub mod run_lifetime;
#[allow(unsafe_code)]
pub mod run_memory;
pub mod spawned;
#[allow(unsafe_code)]
pub mod state;
pub mod table;
pub mod user_namespace;
#[allow(unsafe_code)]
pub mod zone;
