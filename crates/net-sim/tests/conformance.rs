//! The suite of every transport, on the simulated one.

use spurline_net_sim::{After, FaultPlan, Rates, SimNode};
use spurline_transport::conformance::{End, Peer, Rig, Script, run};
use spurline_transport::{Connector, Service};
use std::sync::Arc;

struct Sim;

struct Node(SimNode);

impl Peer for Node {
    fn connector(&self) -> Arc<dyn Connector> {
        self.0.connector()
    }
    fn kill(&mut self) {
        self.0.kill();
    }
}

impl Rig for Sim {
    fn serve(&self, service: Arc<dyn Service>) -> Box<dyn Peer> {
        Box::new(Node(SimNode::new("sim", service, Arc::new(FaultPlan::new(7, Rates::default())))))
    }
    fn play(&self, script: Script) -> Box<dyn Peer> {
        let play = move |header: &_| {
            let (bytes, end) = script(header);
            let after = match end {
                End::Continue => After::Continue,
                End::Close => After::Close,
                End::Stall => After::Stall,
            };
            (bytes, after)
        };
        Box::new(Node(SimNode::playing("sim", play, Arc::new(FaultPlan::new(7, Rates::default())))))
    }
}

#[test]
fn conforms() {
    run(&Sim);
}
