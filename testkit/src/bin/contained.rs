//! Becomes the program of its arguments, with the system calls of a container
//! (`defuse_testkit::container`).

fn main() -> std::process::ExitCode {
    let error = defuse_testkit::container::become_contained();
    eprintln!("contained: {error:#}");
    std::process::ExitCode::from(126)
}
