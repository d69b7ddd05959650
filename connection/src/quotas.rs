//! Limits of one user over all its connections, and of all users together.
//!
//! A user may have many connections. Limits of a connection alone would let one user take
//! everything that the other users need.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::usage::{ConnectionLimits, UsageNumber};

/// The limits of a served file system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServiceQuotas {
    /// Limits of each connection.
    pub connection: ConnectionLimits,
    /// Limits of each user, over all its connections. A connection that is a copy counts in full.
    pub user: ConnectionLimits,
    /// Memory for mapped files of all users, in bytes. More is `ENOMEM`.
    pub mapped_bytes: u64,
}

impl Default for ServiceQuotas {
    /// Half of the memory of the machine or the control group for mapped files, and half of that
    /// for one user.
    fn default() -> Self {
        let mapped_bytes = defuse_hugepages::memory_limit() / 2;
        let user = ConnectionLimits {
            lookups: 1 << 23,
            opens: 1 << 18,
            locks: 1 << 18,
            lock_waits: 1 << 12,
            mapped_bytes: mapped_bytes / 2,
        };
        ServiceQuotas { connection: ConnectionLimits::default(), user, mapped_bytes }
    }
}

/// The accounts of all users.
pub(crate) struct UserAccounts {
    pub(crate) quotas: ServiceQuotas,
    /// The bytes that all users have mapped.
    mapped: Arc<UsageNumber>,
    users: Mutex<HashMap<u32, Weak<UserAccount>>>,
}

/// The account of one user, which its connections share.
pub(crate) struct UserAccount {
    pub(crate) limits: ConnectionLimits,
    pub(crate) lookups: UsageNumber,
    pub(crate) opens: UsageNumber,
    pub(crate) locks: UsageNumber,
    pub(crate) waits: UsageNumber,
    mapped: UsageNumber,
    mapped_of_all: Arc<UsageNumber>,
    most_of_all: u64,
    /// Held while a connection is copied: the objects that the copy adds are counted before the
    /// next copy is checked.
    pub(crate) copying: Mutex<()>,
}

impl UserAccounts {
    pub(crate) fn new(quotas: ServiceQuotas) -> UserAccounts {
        UserAccounts { quotas, mapped: Arc::default(), users: Mutex::default() }
    }

    /// The account of the user `uid`, which lives as long as its connections.
    pub(crate) fn account_of(&self, uid: u32) -> Arc<UserAccount> {
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(account) = users.get(&uid).and_then(Weak::upgrade) {
            return account;
        }
        users.retain(|_, account| account.strong_count() > 0);
        let account = Arc::new(self.account());
        users.insert(uid, Arc::downgrade(&account));
        account
    }

    fn account(&self) -> UserAccount {
        UserAccount {
            limits: self.quotas.user,
            lookups: UsageNumber::default(),
            opens: UsageNumber::default(),
            locks: UsageNumber::default(),
            waits: UsageNumber::default(),
            mapped: UsageNumber::default(),
            mapped_of_all: Arc::clone(&self.mapped),
            most_of_all: self.quotas.mapped_bytes,
            copying: Mutex::default(),
        }
    }
}

impl UserAccount {
    /// Charges mapped bytes, regardless of the limits: the memory is in use.
    pub(crate) fn charge_mapped(&self, bytes: u64) {
        self.mapped.add(bytes);
        self.mapped_of_all.add(bytes);
    }

    /// Gives back mapped bytes.
    pub(crate) fn refund_mapped(&self, bytes: u64) {
        self.mapped.sub(bytes);
        self.mapped_of_all.sub(bytes);
    }

    /// Reserves up to `bytes` for a mapping that is being made, as far as the limits of the user
    /// and of all users allow. Mappings that are made at the same time cannot pass the limits
    /// together.
    pub(crate) fn reserve_mapped(self: &Arc<UserAccount>, bytes: u64) -> ReservedBytes {
        let of_user = self.mapped.take_up_to(bytes, self.limits.mapped_bytes);
        let bytes = self.mapped_of_all.take_up_to(of_user, self.most_of_all);
        assert!(bytes <= of_user, "{bytes} bytes are reserved of {of_user}");
        self.mapped.sub(of_user - bytes);
        ReservedBytes { account: Arc::clone(self), bytes }
    }

    /// The bytes that the user has mapped.
    #[cfg(test)]
    pub(crate) fn mapped_bytes(&self) -> u64 {
        self.mapped.get()
    }
}

/// Mapped bytes that are reserved until this is dropped.
pub(crate) struct ReservedBytes {
    account: Arc<UserAccount>,
    pub(crate) bytes: u64,
}

impl Drop for ReservedBytes {
    fn drop(&mut self) {
        self.account.refund_mapped(self.bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn make_accounts(user: u64, all: u64) -> UserAccounts {
        let limits = ConnectionLimits { mapped_bytes: user, ..ConnectionLimits::default() };
        UserAccounts::new(ServiceQuotas {
            user: limits,
            mapped_bytes: all,
            ..ServiceQuotas::default()
        })
    }

    #[test]
    fn one_user_has_one_account_while_it_has_connections() {
        let accounts = make_accounts(1, 1);
        let (one, other) = (accounts.account_of(5), accounts.account_of(6));
        assert!(Arc::ptr_eq(&one, &accounts.account_of(5)) && !Arc::ptr_eq(&one, &other));
        one.lookups.add(3);
        drop(one);
        assert_eq!(accounts.account_of(5).lookups.get(), 0);
        assert_eq!(accounts.users.lock().unwrap().len(), 2);
    }

    #[test]
    fn reservations_pass_neither_the_limit_of_a_user_nor_that_of_all() {
        let accounts = make_accounts(10, 15);
        let (one, other) = (accounts.account_of(5), accounts.account_of(6));
        let first = one.reserve_mapped(8);
        let second = one.reserve_mapped(8);
        let third = other.reserve_mapped(8);
        assert_eq!((first.bytes, second.bytes, third.bytes), (8, 2, 5));
        assert_eq!((one.mapped_bytes(), other.mapped_bytes(), accounts.mapped.get()), (10, 5, 15));
        drop((first, second));
        assert_eq!(other.reserve_mapped(8).bytes, 5);
        drop(third);
        assert_eq!((one.mapped_bytes(), other.mapped_bytes(), accounts.mapped.get()), (0, 0, 0));
    }
}
