//! A manager with a device that applications may bind, and such applications.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::common::{DefuseOutput, TestPlace, eventually, eventually_or, from_output};

/// The time after which an application that sends nothing is given up.
pub const LIMIT: Duration = Duration::from_secs(2);

/// A manager of the devices /one, which applications may bind, and /two, which they may not.
pub struct BoundManager {
    pub place: TestPlace,
    pub manager: Option<Child>,
}

impl BoundManager {
    pub fn new(top: &str, of_one: &str) -> BoundManager {
        let place = TestPlace::new();
        place.expect_success(&["mkfs", "uhs", "one", "--size", "1G"]);
        let one = place.path("one");
        BoundManager::start_on(place, &one, top, of_one)
    }

    /// A manager whose device /one is `one`, which has a file system.
    pub fn start_on(place: TestPlace, one: &Path, top: &str, of_one: &str) -> BoundManager {
        let mut config = format!("socket = {:?}\n", place.path("socket"));
        config += &format!("answer-within = {}\n{top}\n", LIMIT.as_secs());
        place.expect_success(&["mkfs", "uhs", "two", "--size", "1G"]);
        for (name, device, more) in [("one", one, of_one), ("two", &place.path("two"), "")] {
            let source = format!("uhs:{}", device.display());
            config += &format!("[[device]]\npath = \"/{name}\"\nsource = {source:?}\n{more}\n");
        }
        fs::write(place.path("manager.toml"), config).unwrap();
        let mut managed = BoundManager { place, manager: None };
        managed.start();
        managed
    }

    pub fn start(&mut self) {
        let arguments = ["manager", "--foreground", "--log-file", "log", "manager.toml"];
        let mut command = self.place.command(&arguments);
        self.manager = Some(command.stderr(Stdio::null()).spawn().unwrap());
        let socket = self.place.path("socket");
        eventually("a manager", || socket.exists() && self.stat().is_some());
    }

    /// Ends the manager. Returns its exit code.
    pub fn end(&mut self) -> Option<i32> {
        let mut manager = self.manager.take().unwrap();
        kill_process(Pid::from_child(&manager), Signal::TERM).unwrap();
        manager.wait().unwrap().code()
    }

    pub fn stat(&self) -> Option<Value> {
        let socket = self.place.path("socket").display().to_string();
        let said = self.place.run(&["stat", &socket, "--json"]);
        (said.code == Some(0)).then(|| serde_json::from_str(&said.out).unwrap())
    }

    /// The holder of /one.
    pub fn holder(&self) -> Value {
        self.stat().map_or(Value::Null, |stat| stat["devices"][0]["holder"].clone())
    }

    pub fn await_holder(&self, by: &str) {
        let what = || format!("{by} but {}, by the log\n{}\n", self.holder(), self.log());
        eventually_or(what, || self.holder()["by"] == by && self.holder()["serving"] != false);
    }

    /// The source by which an application binds a device.
    pub fn bound(&self, device: &str) -> String {
        format!("/y=bound:{},device={device}", self.place.path("socket").display())
    }

    /// Starts a shell with /one at /y, in whose run the device then is.
    pub fn application(&self, script: &str) -> ApplicationRun {
        let bound = self.bound("/one");
        let arguments = ["run", "--on-death", "end", "--mount", &bound, "--", "sh", "-c", script];
        let mut command = self.place.command(&arguments);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut application = ApplicationRun(Some(child.spawn().unwrap()));
        let pid = application.pid().as_raw_nonzero().get();
        eventually("an application", || {
            let child = application.0.as_mut().unwrap();
            if child.try_wait().unwrap().is_some() {
                let ended = application.0.take().unwrap().wait_with_output().unwrap();
                panic!("{} {}", from_output(ended).err, self.log());
            }
            let holder = self.holder();
            holder["pid"] == pid && holder["serving"] == true
        });
        application
    }

    /// Runs a shell with the tree at /x. Returns what it prints.
    pub fn shell(&self, script: &str) -> String {
        let mount = format!("/x=shared:{}", self.place.path("socket").display());
        let said = self.place.run(&["run", "--mount", &mount, "--", "sh", "-c", script]);
        said.out + &said.err
    }

    /// Mounts the tree. Returns the mount point.
    pub fn mount(&self) -> PathBuf {
        let text = format!("shared:{}", self.place.path("socket").display());
        self.place.expect_success(&["mount", &text, "mnt"]);
        self.place.path("mnt")
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.place.path("log")).unwrap_or_default()
    }
}

impl Drop for BoundManager {
    fn drop(&mut self) {
        if let Some(mut manager) = self.manager.take() {
            let _ = manager.kill();
            let _ = manager.wait();
        }
    }
}

/// The run of an application: its process has the device.
pub struct ApplicationRun(Option<Child>);

impl ApplicationRun {
    pub fn pid(&self) -> Pid {
        Pid::from_child(self.0.as_ref().unwrap())
    }

    pub fn signal(&self, signal: Signal) {
        kill_process(self.pid(), signal).unwrap();
    }

    /// Stops all of its threads, which may still answer for a moment after the signal.
    pub fn stop(&self) {
        self.signal(Signal::STOP);
        let tasks = format!("/proc/{}/task", self.pid());
        let runs = || {
            let tasks = fs::read_dir(&tasks).unwrap().flatten();
            let states = tasks.map(|task| fs::read_to_string(task.path().join("stat")));
            // proc(5): the state follows the name, which is in parentheses.
            states.flatten().any(|stat| !stat.rsplit(") ").next().unwrap().starts_with('T'))
        };
        while runs() {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Ends its standard input, and so its program. Returns its output.
    pub fn end(mut self) -> DefuseOutput {
        let mut child = self.0.take().unwrap();
        drop(child.stdin.take());
        from_output(child.wait_with_output().unwrap())
    }

    pub fn kill(self) {
        drop(self);
    }
}

impl Drop for ApplicationRun {
    fn drop(&mut self) {
        if let Some(mut child) = self.0.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}
