//! A gateway or a node with an endpoint, and requests over plain HTTP.

use spurline_rig::world::*;
use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

/// An endpoint of a process.
pub struct Endpoint {
    process: Process,
    /// `127.0.0.1:PORT`.
    pub address: String,
}

impl Endpoint {
    /// Starts a gateway of a source at a free port.
    pub fn gateway(world: &World, source: &str, more: &[&str]) -> Endpoint {
        let mut command = world.command(&["gateway", source, "--s3-listen", "127.0.0.1:0"]);
        command.arg("--cache-dir").arg(world.dir("cache")).args(more);
        if more.contains(&"--writable") && !more.contains(&"--s3-keys") {
            command.arg("--s3-writable-without-keys");
        }
        Endpoint::start(with_credentials(&mut command), world)
    }

    /// Starts a gateway that changes a source, for clients with the keys of a file with this text.
    pub fn gateway_with_keys(world: &World, source: &str, keys: &str) -> Endpoint {
        let keys = key_file(world, keys);
        Endpoint::gateway(world, source, &["--writable", "--s3-keys", keys.to_str().unwrap()])
    }

    /// Starts a process with an endpoint.
    pub fn start(command: &mut std::process::Command, world: &World) -> Endpoint {
        let process = Process::start(command, &world.log_path("endpoint"));
        let line = process.wait_for("serving S3 on ");
        let address = line.split("://").last().unwrap().trim().to_owned();
        Endpoint { process, address }
    }

    pub fn log(&self) -> String {
        self.process.log()
    }

    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Ends the process at once.
    pub fn kill(mut self) {
        self.process.kill();
    }

    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Sends a request, and reads the answer until the end of the connection.
    pub fn send(&self, head: &str, headers: &[(&str, &str)], body: &[u8]) -> Answer {
        let mut stream = TcpStream::connect(&self.address).unwrap();
        let mut request = format!("{head} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n", self.address);
        if !body.is_empty() || head.starts_with('P') {
            request.push_str(&format!("Content-Length: {}\r\n", body.len()));
        }
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str("\r\n");
        stream.write_all(request.as_bytes()).unwrap();
        // The endpoint may answer and close the connection before all is sent.
        let _ = stream.write_all(body);
        Answer::read(&mut stream)
    }

    pub fn get(&self, path: &str) -> Answer {
        self.send(&format!("GET {path}"), &[], b"")
    }

    pub fn put(&self, path: &str, body: &[u8]) -> Answer {
        self.send(&format!("PUT {path}"), &[], body)
    }

    pub fn delete(&self, path: &str) -> Answer {
        self.send(&format!("DELETE {path}"), &[], b"")
    }
}

/// A file of keys with this text, which only this user can read.
pub fn key_file(world: &World, keys: &str) -> PathBuf {
    let file = world.file("keys", keys.as_bytes());
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
    file
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    head: String,
    pub body: Vec<u8>,
}

impl Answer {
    /// Reads to the end of the connection.
    pub fn read(stream: &mut TcpStream) -> Answer {
        let mut bytes = Vec::new();
        // The end may be a reset, where the endpoint has not taken all of the request.
        let _ = stream.read_to_end(&mut bytes);
        let end = bytes.windows(4).position(|four| four == b"\r\n\r\n").expect("an answer");
        let head = String::from_utf8(bytes[..end].to_vec()).unwrap();
        let status = head.split(' ').nth(1).unwrap().parse().unwrap();
        let mut answer = Answer { status, head, body: bytes[end + 4..].to_vec() };
        if answer.header("transfer-encoding") == Some("chunked") {
            answer.body = joined_chunks(&answer.body);
        }
        answer
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        let lines = self.head.lines().filter_map(|line| line.split_once(':'));
        lines.into_iter().find(|(given, _)| given.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
    }

    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }

    /// The texts of all elements with this name.
    pub fn elements(&self, name: &str) -> Vec<String> {
        let text = self.text();
        let tag = format!("<{name}>");
        let parts = text.split(&tag).skip(1);
        parts.filter_map(|part| Some(part.split_once("</")?.0.to_owned())).collect()
    }

    /// Fails unless the answer has this status and, if it is an error, this code.
    #[track_caller]
    pub fn expect(self, status: u16, code: &str) -> Answer {
        assert_eq!(self.status, status, "{self:?}: {}", self.text());
        assert!(code.is_empty() || self.elements("Code") == [code], "{}", self.text());
        self
    }
}

fn joined_chunks(mut rest: &[u8]) -> Vec<u8> {
    let mut joined = Vec::new();
    while let Some(end) = rest.windows(2).position(|two| two == b"\r\n") {
        let len = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        joined.extend_from_slice(&rest[end + 2..end + 2 + len]);
        rest = &rest[(end + 4 + len).min(rest.len())..];
    }
    joined
}

/// A directory with files at these paths.
pub fn make_files(root: &Path, files: &[(&str, &[u8])]) {
    for (path, bytes) in files {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, bytes).unwrap();
    }
}
