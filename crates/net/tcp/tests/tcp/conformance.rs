//! The suite of every transport, on TCP over loopback: IPv4 and IPv6.

use spurline_mem::BufferPool;
use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{FrameHeader, HEADER_LEN, frame_padding};
use spurline_transport::conformance::{PeerScript, ScriptEnd, TestPeer, TransportRig, run_suite};
use spurline_transport::{Connector, Service};
use spurline_trust::{GroupTokens, Trust};
use spurline_types::Stats;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The listening address, and the proofs of both sides.
struct Tcp(&'static str, Shown);

#[derive(Clone, Copy)]
enum Shown {
    Nothing,
    Token,
    /// The token, over TLS.
    Sealed,
}

fn trust(shown: Shown) -> Arc<Trust> {
    let token = || Trust::with_tokens("both", GroupTokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap());
    match shown {
        Shown::Nothing => Trust::without_checks(),
        Shown::Token => token(),
        Shown::Sealed => token().with_tls(None).unwrap(),
    }
}

fn connector(addr: SocketAddr, shown: Shown) -> Arc<dyn Connector> {
    let connector = TcpConnector::new(&addr.to_string(), vec![], SocketOptions::default(), Arc::default());
    Arc::new(connector.with_trust(trust(shown)))
}

struct Served(Option<TcpServer>, SocketAddr, Shown);

impl TestPeer for Served {
    fn connector(&self) -> Arc<dyn Connector> {
        connector(self.1, self.2)
    }
    fn kill(&mut self) {
        if let Some(server) = self.0.take() {
            server.join(Instant::now() + Duration::from_secs(10));
        }
    }
}

struct Played(SocketAddr);

impl TestPeer for Played {
    fn connector(&self) -> Arc<dyn Connector> {
        connector(self.0, Shown::Nothing)
    }
    fn kill(&mut self) {}
}

impl TransportRig for Tcp {
    fn serve_with(&self, service: Arc<dyn Service>) -> Box<dyn TestPeer> {
        let addr = self.0.parse().unwrap();
        let pool = BufferPool::new(32 << 20, 4 << 20).unwrap();
        let config = ServerConfig { trust: trust(self.1), payload_pool: Some(pool), ..ServerConfig::default() };
        let server = TcpServer::bind(&[addr], service, config, Arc::new(Stats::default())).unwrap();
        let addr = server.local_addrs()[0];
        Box::new(Served(Some(server), addr, self.1))
    }
    fn play_script(&self, script: PeerScript) -> Box<dyn TestPeer> {
        let listener = TcpListener::bind(self.0).unwrap();
        let addr = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            for socket in listener.incoming().flatten() {
                let script = Arc::clone(&script);
                std::thread::spawn(move || play_one(socket, &script));
            }
        });
        Box::new(Played(addr))
    }
}

fn play_one(mut socket: TcpStream, script: &PeerScript) -> Option<()> {
    loop {
        let mut head = [0u8; HEADER_LEN];
        socket.read_exact(&mut head).ok()?;
        let header = FrameHeader::decode(&head).ok()?;
        let body_len = header.body_len as usize;
        socket.read_exact(&mut vec![0; body_len + frame_padding(body_len).len()]).ok()?;
        let (bytes, end) = script(&header);
        socket.write_all(&bytes).ok()?;
        match end {
            ScriptEnd::Continue => {}
            ScriptEnd::Close => return None,
            // Until the reader times out.
            ScriptEnd::Stall => {
                let _ = socket.read_exact(&mut head);
                return None;
            }
        }
    }
}

#[test]
fn conforms_over_ipv4() {
    run_suite(&Tcp("127.0.0.1:0", Shown::Nothing));
}

#[test]
fn conforms_with_a_group_token() {
    run_suite(&Tcp("127.0.0.1:0", Shown::Token));
}

#[test]
fn conforms_over_tls() {
    run_suite(&Tcp("127.0.0.1:0", Shown::Sealed));
}

#[test]
fn conforms_over_ipv6() {
    if let Err(e) = TcpListener::bind("[::1]:0") {
        println!("SKIP: no IPv6 loopback here: {e}");
        let required = std::env::var("SPURLINE_TEST_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|part| part == "ipv6"), "SPURLINE_TEST_REQUIRE lists ipv6");
        return;
    }
    run_suite(&Tcp("[::1]:0", Shown::Nothing));
}
