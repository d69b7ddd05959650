//! The C library's functions that make a program another user.
//!
//! The kernel knows credentials of threads alone. These functions change the credentials of all
//! threads of a process, one after the other in a handler of a signal; the number of the system
//! calls there does not appear in the code, so that they are not patched. Each thread therefore
//! queries its credentials from the kernel, once it learns that some have changed.

use crate::machine::inside::InsideGuard;
use crate::process::{credentials, state};

/// Runs `change`, after which the process may have other credentials.
fn with_refresh(change: impl FnOnce() -> i64) -> i64 {
    if let (Some(process), Some(_inside)) = (state::get(), InsideGuard::enter()) {
        process.client.prepare_privilege_drop();
    }
    let value = change();
    credentials::record_change();
    value
}

macro_rules! changes {
    ($($name:ident)*) => {
        #[allow(non_upper_case_globals)]
        mod next {
            use crate::catch::next::{NextFunction, name};

            $(pub static $name: NextFunction = NextFunction::new(name(concat!(stringify!($name), "\0")));)*
            pub static ALL: &[&NextFunction] = &[$(&$name),*];
        }
        pub use next::ALL;

        $(
            /// # Safety
            ///
            /// The function of this name: the arguments are the program's.
            #[unsafe(no_mangle)]
            // SAFETY: as the function of this name.
            pub unsafe extern "C" fn $name(a: u64, b: u64, c: u64) -> i64 {
                with_refresh(|| next::$name.call(&[a, b, c, 0, 0, 0]))
            }
        )*

        /// The names of the exported functions.
        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

changes! {
    setuid setgid seteuid setegid setreuid setregid setresuid setresgid setgroups initgroups
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_c_library_has_all_of_them() {
        let next = |name: &&&str| {
            let name = std::ffi::CString::new(**name).unwrap();
            crate::catch::next::find(&name) == 0
        };
        assert_eq!(NAMES.iter().filter(next).collect::<Vec<_>>(), Vec::<&&str>::new());
    }
}
