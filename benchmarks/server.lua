-- The delay before each answer's first byte, and the counters.
local server = {}
local counters = ngx.shared.counters
local root = os.getenv("HEADRACE_BENCH_ROOT")
local sizes = {}

local function size_of(path)
  if not sizes[path] then
    local file = io.open(root .. path, "rb")
    if not file then return 0 end
    sizes[path] = file:seek("end")
    file:close()
  end
  return sizes[path]
end

-- Bytes that a request asks for; the server counts them when it is asked, "sent" when it has answered.
local function asked_bytes(path)
  local start, stop = (ngx.var.http_range or ""):match("^bytes=(%d*)%-(%d*)$")
  if not start then return size_of(path) end
  if start == "" then return tonumber(stop) or 0 end
  local last = size_of(path) - 1
  return math.max(0, math.min(tonumber(stop) or last, last) - tonumber(start) + 1)
end

function server.delay()
  local in_flight = counters:incr("in_flight", 1, 0)
  if in_flight > (counters:get("peak_in_flight") or 0) then counters:set("peak_in_flight", in_flight) end
  local delay_ms, path = ngx.var.uri:match("^/d(%d+)(/.*)$")
  if not path then return ngx.exit(404) end
  if ngx.req.get_method() == "GET" then counters:incr("asked_bytes", asked_bytes(path), 0) end
  ngx.req.set_uri(path, false)
  if delay_ms ~= "0" then ngx.sleep(tonumber(delay_ms) / 1000) end
end

function server.count()
  counters:incr("in_flight", -1, 0)
  counters:incr("requests", 1, 0)
  counters:incr("sent_bytes", tonumber(ngx.var.bytes_sent), 0)
end

function server.stats()
  local function value(name) return counters:get(name) or 0 end
  ngx.say(string.format('{"requests": %d, "asked_bytes": %.0f, "sent_bytes": %.0f, "peak_in_flight": %d, "pid": %d}',
    value("requests"), value("asked_bytes"), value("sent_bytes"), value("peak_in_flight"), ngx.worker.pid()))
end

function server.reset()
  for _, name in ipairs { "requests", "asked_bytes", "sent_bytes", "peak_in_flight" } do counters:set(name, 0) end
  ngx.say("{}")
end

return server
