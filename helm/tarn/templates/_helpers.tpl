{{- define "tarn.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Short enough that the longest suffix ("-migrate") still makes a valid name. */}}
{{- define "tarn.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 52 | trimSuffix "-" }}
{{- else if contains (include "tarn.name" .) .Release.Name }}
{{- .Release.Name | trunc 52 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name (include "tarn.name" .) | trunc 52 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{- define "tarn.serviceAccountName" -}}
{{- if .Values.serviceAccount.create }}
{{- .Values.serviceAccount.name | default (include "tarn.fullname" .) }}
{{- else }}
{{- .Values.serviceAccount.name | default "default" }}
{{- end }}
{{- end }}

{{- define "tarn.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end }}

{{/* What selects the pods of one component. Never changes between versions: selectors are immutable.
     Takes (list $ "component"), as do the helpers below it. */}}
{{- define "tarn.selectorLabels" -}}
{{- $root := first . -}}
app.kubernetes.io/name: {{ include "tarn.name" $root }}
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ last . }}
{{- end }}

{{- define "tarn.labels" -}}
{{- $root := first . -}}
{{ include "tarn.selectorLabels" . }}
app.kubernetes.io/version: {{ $root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ $root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" $root.Chart.Name $root.Chart.Version | replace "+" "_" | trunc 63 | trimSuffix "-" }}
{{- end }}

{{/* Labels of the values, then ours over them, so that no value can pull a pod out of its selector. */}}
{{- define "tarn.podMetadata" -}}
{{- $root := first . -}}
labels: {{- merge (include "tarn.labels" . | fromYaml) $root.Values.podLabels | toYaml | nindent 2 }}
{{- with $root.Values.podAnnotations }}
annotations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* Service links would add TARN_… variables of Kubernetes' own, and Tarn refuses to start with any it does not know. */}}
{{- define "tarn.podBasics" -}}
enableServiceLinks: false
automountServiceAccountToken: false
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile:
    type: RuntimeDefault
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "tarn.containerBasics" -}}
image: {{ include "tarn.image" . | quote }}
imagePullPolicy: {{ .Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
volumeMounts:
  - name: scratch
    mountPath: /scratch
  - name: tmp
    mountPath: /tmp
{{- end }}

{{/* Takes (dict "scratch" size "tmp" size). */}}
{{- define "tarn.volumes" -}}
volumes:
  - name: scratch
    emptyDir:
      sizeLimit: {{ .scratch }}
  - name: tmp
    emptyDir:
      sizeLimit: {{ .tmp }}
{{- end }}

{{- define "tarn.placement" -}}
{{- with .nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* The same settings for every process. Numbers go through toJson, as 1048576 would else become 1.048576e+06. */}}
{{- define "tarn.env" -}}
- name: TARN_LAKE_URI
  value: {{ .Values.lake.uri | quote }}
{{- with .Values.lake.storageOptions }}
{{- if .existingSecret }}
- name: TARN_STORAGE_OPTIONS
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
{{- with .Values.fetch.stores }}
{{- if .existingSecret }}
- name: TARN_FETCH_STORES
  valueFrom:
    secretKeyRef:
      name: {{ .existingSecret }}
      key: {{ .key }}
{{- end }}
{{- end }}
- name: TARN_DATABASE_URL
  valueFrom:
    secretKeyRef:
      name: {{ .Values.database.existingSecret }}
      key: {{ .Values.database.key }}
- name: TARN_ADMIN_KEY
  valueFrom:
    secretKeyRef:
      name: {{ .Values.adminKey.existingSecret }}
      key: {{ .Values.adminKey.key }}
- name: TARN_SHUTDOWN_GRACE
  value: {{ .Values.shutdownGrace | toJson | quote }}
- name: TARN_SPARK_MASTER
  value: {{ .Values.spark.master | quote }}
- name: TARN_SPARK_MEMORY
  value: {{ .Values.spark.memory | quote }}
{{- range $name, $value := .Values.settings }}
- name: {{ $name }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- with .Values.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}
