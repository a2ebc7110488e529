//! A TCP relay between a client and the API server that can lose answers. It knows no TLS and no HTTP.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// What passes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum RelayMode {
    /// Everything.
    Open,
    /// What clients send. Answers are lost, and with them the handshakes of new connections.
    AnswersLost,
}

/// A relay; its threads end with their connections.
pub struct ServerRelay {
    pub port: u16,
    mode: Arc<AtomicU8>,
}

impl ServerRelay {
    /// Listens on loopback, and connects to `target` for each client.
    pub fn start(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let mode = Arc::new(AtomicU8::new(RelayMode::Open as u8));
        let shared = Arc::clone(&mode);
        std::thread::spawn(move || {
            for client in listener.incoming().map_while(Result::ok) {
                let Ok(server) = TcpStream::connect(target) else { continue };
                let (to_server, to_client) = (server.try_clone().unwrap(), client.try_clone().unwrap());
                std::thread::spawn(move || pass(client, to_server, || true));
                let mode = Arc::clone(&shared);
                let is_open = move || mode.load(Ordering::SeqCst) == RelayMode::Open as u8;
                std::thread::spawn(move || pass(server, to_client, is_open));
            }
        });
        ServerRelay { port, mode }
    }

    pub fn set_mode(&self, mode: RelayMode) {
        self.mode.store(mode as u8, Ordering::SeqCst);
    }
}

/// Copies bytes until an end closes. Those that come while `passes` is false are lost, and later ones end the connection.
fn pass(mut from: TcpStream, mut to: TcpStream, passes: impl Fn() -> bool) {
    let (mut buffer, mut is_whole) = ([0; 16 << 10], true);
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        match passes() {
            false => is_whole = false,
            true if !is_whole || to.write_all(&buffer[..count]).is_err() => break,
            true => {}
        }
    }
    let _ = to.shutdown(Shutdown::Both);
    let _ = from.shutdown(Shutdown::Both);
}
