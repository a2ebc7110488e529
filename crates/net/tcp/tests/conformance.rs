//! The suite of every transport, on TCP over loopback: IPv4 and IPv6.

use spurline_net_tcp::{ServerConfig, SocketOptions, TcpConnector, TcpServer};
use spurline_proto::{HEADER_LEN, Header, padding};
use spurline_transport::conformance::{End, Peer, Rig, Script, run};
use spurline_transport::{Connector, Service};
use spurline_trust::{Tokens, Trust};
use spurline_types::Stats;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Where it listens, and what both sides prove.
struct Tcp(&'static str, Shown);

#[derive(Clone, Copy)]
enum Shown {
    Nothing,
    Token,
    /// The token, over TLS.
    Sealed,
}

fn trust(shown: Shown) -> Arc<Trust> {
    let token = || Trust::with_tokens("both", Tokens::parse(b"q5Ykm0WJ7b2uR1xTzv9sLd3f").unwrap());
    match shown {
        Shown::Nothing => Trust::anyone(),
        Shown::Token => token(),
        Shown::Sealed => token().encrypted(None).unwrap(),
    }
}

fn connector(addr: SocketAddr, shown: Shown) -> Arc<dyn Connector> {
    let connector = TcpConnector::new(&addr.to_string(), vec![], SocketOptions::default(), Arc::default());
    Arc::new(connector.trusting(trust(shown)))
}

struct Served(Option<TcpServer>, SocketAddr, Shown);

impl Peer for Served {
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

impl Peer for Played {
    fn connector(&self) -> Arc<dyn Connector> {
        connector(self.0, Shown::Nothing)
    }
    fn kill(&mut self) {}
}

impl Rig for Tcp {
    fn serve(&self, service: Arc<dyn Service>) -> Box<dyn Peer> {
        let addr = self.0.parse().unwrap();
        let config = ServerConfig { trust: trust(self.1), ..ServerConfig::default() };
        let server = TcpServer::bind(&[addr], service, config, Arc::new(Stats::default())).unwrap();
        let addr = server.local_addrs()[0];
        Box::new(Served(Some(server), addr, self.1))
    }
    fn play(&self, script: Script) -> Box<dyn Peer> {
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

fn play_one(mut socket: TcpStream, script: &Script) -> Option<()> {
    loop {
        let mut head = [0u8; HEADER_LEN];
        socket.read_exact(&mut head).ok()?;
        let header = Header::decode(&head).ok()?;
        let body_len = header.body_len as usize;
        socket.read_exact(&mut vec![0; body_len + padding(body_len).len()]).ok()?;
        let (bytes, end) = script(&header);
        socket.write_all(&bytes).ok()?;
        match end {
            End::Continue => {}
            End::Close => return None,
            // Until the reader gives up.
            End::Stall => {
                let _ = socket.read_exact(&mut head);
                return None;
            }
        }
    }
}

#[test]
fn conforms_over_ipv4() {
    run(&Tcp("127.0.0.1:0", Shown::Nothing));
}

#[test]
fn conforms_with_a_group_token() {
    run(&Tcp("127.0.0.1:0", Shown::Token));
}

#[test]
fn conforms_over_tls() {
    run(&Tcp("127.0.0.1:0", Shown::Sealed));
}

#[test]
fn conforms_over_ipv6() {
    if let Err(e) = TcpListener::bind("[::1]:0") {
        println!("SKIP: no IPv6 loopback here: {e}");
        let required = std::env::var("SPURLINE_REQUIRE").unwrap_or_default();
        assert!(!required.split(',').any(|part| part == "ipv6"), "SPURLINE_REQUIRE lists ipv6");
        return;
    }
    run(&Tcp("[::1]:0", Shown::Nothing));
}
