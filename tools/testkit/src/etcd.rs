//! Real etcd servers on free ports of loopback, killed when they are dropped.

use std::io;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// An etcd server with its data in a directory.
pub struct EtcdServer {
    child: Child,
    port: u16,
}

fn free_port() -> io::Result<u16> {
    TcpListener::bind("127.0.0.1:0")?.local_addr().map(|at| at.port())
}

impl EtcdServer {
    /// Whether there is an etcd on this machine; says SKIP when not.
    ///
    /// # Panics
    /// When it is required.
    pub fn there() -> bool {
        let found = Command::new("etcd").arg("--version").stdout(Stdio::null()).status().is_ok();
        if !found {
            crate::skip("etcd", "there is no etcd here (package etcd-server)");
        }
        found
    }

    /// Starts one at a port of choice (0: any), with more words, and waits until it listens.
    ///
    /// # Errors
    /// When it does not within two minutes.
    pub fn start(dir: &Path, port: u16, scheme: &str, more: &[&str]) -> io::Result<EtcdServer> {
        let begun = Instant::now();
        loop {
            let (at, peers) = (if port == 0 { free_port()? } else { port }, free_port()?);
            let url = format!("{scheme}://127.0.0.1:{at}");
            let peer = format!("http://127.0.0.1:{peers}");
            let mut command = Command::new("etcd");
            command.arg("--data-dir").arg(dir).args(["--listen-client-urls", &url, "--advertise-client-urls", &url]);
            command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
            command.arg("--initial-cluster").arg(format!("default={peer}")).args(more);
            let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn()?;
            let mut server = EtcdServer { child, port: at };
            // Somebody else may have taken a port in between: then it ends, and others are tried.
            while server.child.try_wait()?.is_none() {
                if TcpStream::connect(("127.0.0.1", at)).is_ok() {
                    return Ok(server);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            if begun.elapsed() > Duration::from_secs(120) {
                return Err(io::Error::other("etcd does not start"));
            }
        }
    }

    /// From now on it takes connections and answers nothing.
    pub fn hang(&self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.child.id().cast_signed()) {
            // It can't be gone: nobody waited for it.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::STOP);
        }
    }

    /// Where it listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The registry it is.
    pub fn url(&self) -> String {
        format!("etcd://127.0.0.1:{}", self.port)
    }
}

impl Drop for EtcdServer {
    fn drop(&mut self) {
        // One that ended already is waited for all the same.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
