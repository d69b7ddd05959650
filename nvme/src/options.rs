//! Settings of the driver, what queues know of a namespace, and failures to open it.

use std::fmt;
use std::time::Duration;

use defuse_block::{DeviceProperties, Errno};

use crate::ControllerTransport;
use crate::controller::AdminFailure;
use crate::spec::UnsupportedNamespace;

/// Settings of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeOptions {
    /// The namespace.
    pub namespace: u32,
    /// The time after which a command is aborted.
    pub timeout: Duration,
    /// Pairs of I/O queues at most.
    pub max_queues: u16,
    /// The controller reaches no memory of callers: all data is copied. This option is for a
    /// controller that is not trusted, if memory that was once used for I/O is used for other
    /// things later.
    pub copy_all: bool,
}

impl Default for NvmeOptions {
    fn default() -> Self {
        let timeout = Duration::from_secs(30);
        NvmeOptions { namespace: 1, timeout, max_queues: 64, copy_all: false }
    }
}

/// A failure to open or to query a controller.
#[derive(Debug)]
pub enum NvmeError {
    /// The controller cannot be used, for a reason of its own.
    Unfit {
        /// The controller.
        name: String,
        /// The reason, as a verb and more.
        why: String,
    },
    /// The namespace cannot be used.
    Namespace {
        /// The controller.
        name: String,
        /// The namespace.
        id: u32,
        /// The reason.
        why: UnsupportedNamespace,
    },
    /// An admin command failed.
    Command {
        /// The controller.
        name: String,
        /// The purpose of the command, as a verb: "identify".
        action: &'static str,
        /// The reason.
        failure: AdminFailure,
    },
    /// A system call failed.
    System {
        /// The controller.
        name: String,
        /// The step that failed, as a verb.
        action: &'static str,
        /// The error.
        errno: Errno,
    },
    /// A limit of this process leaves too little memory.
    Limit {
        /// The controller.
        name: String,
        /// The limit, with the next step.
        why: String,
    },
}

/// Facts about a namespace that queues need.
pub(crate) struct NamespaceParameters {
    pub(crate) id: u32,
    pub(crate) facts: DeviceProperties,
    pub(crate) sgl: bool,
    pub(crate) writes_zeroes: bool,
    /// Blocks of a Write Zeroes command at most.
    pub(crate) max_zeroes: u64,
    /// Blocks of a range that is deallocated at most.
    pub(crate) max_discard: u64,
    pub(crate) timeout: Duration,
}

impl NvmeError {
    /// The limit of this process that is the reason for this error, or else this error.
    pub(crate) fn explain_limit(self, transport: &dyn ControllerTransport) -> NvmeError {
        let short = match &self {
            NvmeError::System { errno, .. } => *errno == Errno::NOMEM,
            NvmeError::Command { failure, .. } => *failure == AdminFailure::Memory(Errno::NOMEM),
            NvmeError::Unfit { .. } | NvmeError::Namespace { .. } | NvmeError::Limit { .. } => {
                false
            }
        };
        match transport.shortage() {
            Some(why) if short => NvmeError::Limit { name: transport.name(), why },
            _ => self,
        }
    }
}

impl fmt::Display for NvmeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            NvmeError::Unfit { name, why } => write!(f, "{name} {why}"),
            NvmeError::Namespace { name, id, why } => write!(f, "namespace {id} of {name} {why}"),
            NvmeError::Command { name, action, failure } => {
                write!(f, "cannot {action} {name}: {failure}")
            }
            NvmeError::System { name, action, errno } => {
                write!(f, "cannot {action} of {name}: {errno}")
            }
            NvmeError::Limit { name, why } => write!(f, "cannot use {name}: {why}"),
        }
    }
}

impl std::error::Error for NvmeError {}
